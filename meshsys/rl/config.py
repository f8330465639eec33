"""The options of reinforcement learning."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from meshsys.config_file import INT32_MAX, Count, FromList, Section
from meshsys.rl.algorithm_config import AlgorithmConfig
from meshsys.rl.environments.config import EnvironmentConfig
from meshsys.rl.rewards.config import RewardConfig, RewardPoolConfig
from meshsys.rl.speculative.config import SpeculativeConfig
from meshsys.rl.tasks.config import TaskConfig

__all__ = ["RlConfig", "SamplingAxes", "SamplingConfig"]


class SamplingAxes(Section):
    """Devices along each axis of the sampling layout: over the devices that train, or those that `rl.mode` leaves.

    Attributes:
        data: copies of the model, each with its share of the sequences; null means all devices that the others leave.
        tensor: devices that share each layer's matrices.
        expert: devices that share the experts of a mixture.
    """

    data: Count | None = None
    tensor: Count = 1
    expert: Count = 1


class SamplingConfig(Section):
    """How responses are sampled.

    Attributes:
        axes: the layout.
        slots: sequences that are sampled at once; null means all of a step.
        compact: go on with fewer slots when half of them or more are free and nothing waits for them.
        temperature: divides the logits.
        top_k: tokens to choose from, the likeliest ones; 0 means all.
        top_p: the likeliest tokens with this much probability are chosen from.
        min_p: tokens with this share of the likeliest one's probability are chosen from.
        tolerance: the most that a token's log-probability may differ between sampler and trainer; a run stops at more.
            Null means 1e-3 with float32 models, and otherwise any, as with `rl.mode: overlap`.
    """

    axes: SamplingAxes = Field(default_factory=SamplingAxes)
    slots: Count | None = None
    compact: bool = True
    temperature: float = Field(default=1.0, gt=0, le=1e6)
    top_k: int = Field(default=0, ge=0, le=INT32_MAX)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    tolerance: Annotated[float, Field(gt=0)] | None = None


class RlConfig(Section):
    """A policy that learns from its own responses: what it is asked, how it is judged, how it learns.

    Attributes:
        mode: `alternate`: all devices sample, then all train. `periodic`: the devices of `mesh.topology` that
            `mesh.axes` leaves sample, and the others take gradients meanwhile, of groups of the same step. `overlap`:
            they sample for later steps too.
        max_staleness: with `overlap`, the most steps between the policy that draws a token and the one that learns from
            it; null means 2.
        tasks: where prompts come from.
        environment: what answers to the policy in turns; null for one response to each prompt.
        rewards: what responses are worth: a sum.
        reward_pool: the processes that compute rewards.
        algorithm: how the policy learns.
        sampling: how responses are sampled.
        speculative: whether responses begin as those of the epoch before.
        reshard: how parameters go from the training layout to the sampling layout: a `copy`, or only the pieces that
            changed (`delta`).
        prompts_per_step: prompts that a step samples responses to.
        samples_per_prompt: responses to each: a group.
        responses_per_row: responses to one prompt that are learned from in one row, which has their prompt only once.
        max_prompt_tokens: longer prompts are left out.
        max_response_tokens: where a response is cut off; of a game, all tokens from the first action on.
        minibatches: parts of a step's responses, each an optimizer step.
        epochs: how often a step's responses are learned from.
        refills: how often a step samples more prompts in place of those whose responses are all worth the same, where
            the algorithm does so.
        transcripts: responses that samples.jsonl keeps of each step.
    """

    mode: Literal["alternate", "periodic", "overlap"] = "alternate"
    max_staleness: Count | None = None
    tasks: Annotated[tuple[TaskConfig, ...], FromList, Field(min_length=1)]
    environment: EnvironmentConfig | None = None
    rewards: Annotated[tuple[RewardConfig, ...], FromList, Field(min_length=1)] = (RewardConfig(),)
    reward_pool: RewardPoolConfig = Field(default_factory=RewardPoolConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    speculative: SpeculativeConfig = Field(default_factory=SpeculativeConfig)
    reshard: Literal["copy", "delta"] = "copy"
    prompts_per_step: Count = 8
    samples_per_prompt: Count = 8
    responses_per_row: Count = 1
    max_prompt_tokens: Count = 128
    max_response_tokens: Count = 128
    minibatches: Count = 1
    epochs: Count = 1
    refills: int = Field(default=8, ge=0, le=INT32_MAX)
    transcripts: int = Field(default=4, ge=0, le=INT32_MAX)

    @model_validator(mode="after")
    def _games_are_not_responses(self) -> Self:
        if self.environment is None:
            return self
        if any(reward.kind == "task" and reward.extract for reward in self.rewards):
            raise ValueError(
                "rl.rewards has an extract for kind=task, which is the environment's own reward with rl.environment; "
                "leave it out, or set rl.environment.options.extract if the environment has that"
            )
        if self.speculative.mode != "off":
            raise ValueError(
                f"rl.speculative.mode={self.speculative.mode} drafts single responses, and rl.environment plays in "
                "turns; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _staleness_is_of_overlap(self) -> Self:
        if self.max_staleness is not None and self.mode != "overlap":
            raise ValueError(
                f"rl.max_staleness={self.max_staleness} is not used by rl.mode={self.mode}, which learns from tokens "
                "of the newest policy; leave it out, or set rl.mode=overlap"
            )
        return self

    @property
    def rows_per_prompt(self) -> int:
        """Rows that learn from the responses to one prompt."""
        return self.samples_per_prompt // self.responses_per_row

    @property
    def responses(self) -> int:
        """Of a step."""
        return self.prompts_per_step * self.samples_per_prompt
