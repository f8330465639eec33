"""What a policy is asked: prompts by number, from generators and files."""

from meshsys.rl.prompt import Prompt
from meshsys.rl.tasks.base import Task
from meshsys.rl.tasks.config import TaskConfig
from meshsys.rl.tasks.encode import encode_prompt
from meshsys.rl.tasks.mixture import Mixture
from meshsys.rl.tasks.registry import open_task, open_tasks

__all__ = ["Mixture", "Prompt", "Task", "TaskConfig", "encode_prompt", "open_task", "open_tasks"]
