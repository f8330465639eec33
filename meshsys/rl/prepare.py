"""What a configuration of `meshsys rl` means, checked before anything is written."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from jax.sharding import AxisType, Mesh

from meshsys.assemble import Assembly, assemble
from meshsys.config import Config
from meshsys.errors import ConfigError
from meshsys.mesh import make_mesh
from meshsys.rl.algorithm_config import Recipe
from meshsys.rl.config import RlConfig
from meshsys.rl.environments import environment_maker
from meshsys.rl.games import Games
from meshsys.rl.learn import rows_of_an_update
from meshsys.rl.modes.checks import check_mode
from meshsys.rl.modes.periodic import groups_of_a_part
from meshsys.rl.prompts import PromptStream
from meshsys.rl.rewards import RewardPool
from meshsys.rl.rollouts import length_of_a_row
from meshsys.rl.speculative.sampling import Speculation, speculation_of
from meshsys.rl.tasks.mixture import Mixture
from meshsys.rl.tasks.registry import open_tasks
from meshsys.rl.update import PolicyUpdate
from meshsys.sharding import BATCH_AXES
from meshsys.torus import AXES, Topology, place
from models.sampling import Sampling

__all__ = ["Prepared", "prepare", "prompt_stream"]


@dataclass(frozen=True)
class Prepared:
    """What a run is made of.

    Attributes:
        assembly: for the rows of an optimizer step.
        sampling_mesh: over the devices that train, or over the others where both go on at once.
        rows: of an optimizer step, or of a part of one.
        speculation: None without drafts.
        games: None without an environment.
    """

    config: Config
    rl: RlConfig
    assembly: Assembly
    recipe: Recipe
    update: PolicyUpdate
    sampling_mesh: Mesh
    prompts: Mixture
    rewards: RewardPool
    rows: int
    speculation: Speculation | None
    games: Games | None


def prepare(config: Config, rl: RlConfig, topology: Topology) -> Prepared:
    """Checks a configuration as a whole, and starts the processes that compute rewards.

    Raises:
        ConfigError: parts that do not fit; the message names the options.
    """
    axes = config.mesh.axes
    unit = config.pipeline.microbatches * math.prod(getattr(axes, axis) for axis in BATCH_AXES)
    rows = rows_of_an_update(rl, unit)
    if rl.mode == "periodic":
        rows = -(-groups_of_a_part(rl, unit) * rl.rows_per_prompt // unit) * unit
    length = length_of_a_row(rl.max_prompt_tokens, rl.max_response_tokens, rl.responses_per_row)
    parts = 2 * axes.context if axes.context > 1 else 1
    recipe = _recipe(rl, axes.context, config.model.dtype)
    of_an_update = config.model_copy(
        update={
            "data": config.data.model_copy(update={"batch_size": rows, "sequence_length": -(-length // parts) * parts}),
            "train": config.train.model_copy(update={"steps": config.train.steps * rl.minibatches * rl.epochs}),
            "model": dataclasses.replace(config.model, value_head=recipe.value_loss is not None),
        }
    )
    assembly = assemble(of_an_update)
    if assembly.schedule.period:
        raise ConfigError(
            f"pipeline.schedule={config.pipeline.schedule} has no flush: it updates a policy while an older one is "
            "still learned from; take another, as 1f1b"
        )
    how = rl.sampling
    sampling = Sampling(how.temperature, how.top_k, how.top_p, how.min_p)
    if config.pipeline.head == "vocab_parallel":
        _check_divided_head(recipe, sampling)
    mesh = make_mesh(assembly.placement)
    sampling_mesh = _sampling_mesh(rl, topology, mesh)
    prompts = open_tasks(rl.tasks, config.run.seed, chat=assembly.tokenizer.chat is not None)
    games = _games(rl, assembly)
    # What no prompt fits into is refused before anything is written.
    prompt_stream(prompts, assembly, rl, games).take(1)
    update = PolicyUpdate(assembly, mesh, recipe.policy_loss, sampling, recipe.value_loss)
    rewards = RewardPool(rl.rewards, rl.reward_pool, scorers=() if games else prompts.scorers)
    drafts = speculation_of(rl, prompts, update, rows, config.run.seed)
    return Prepared(config, rl, assembly, recipe, update, sampling_mesh, prompts, rewards, rows, drafts, games)


def prompt_stream(prompts: Mixture, assembly: Assembly, rl: RlConfig, games: Games | None, at: int = 0) -> PromptStream:
    """The run's prompts from a place on."""
    opening = games.opening if games else None
    return PromptStream(prompts, assembly.tokenizer, _begin(assembly), rl.max_prompt_tokens, at, opening)


def _begin(assembly: Assembly) -> tuple[int, ...]:
    """The tokens that a text begins with; for a model that is new, as a document does."""
    tokenizer = assembly.tokenizer
    start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    return tokenizer.prompt_ids if assembly.config.model.pretrained else (start,)


def _games(rl: RlConfig, assembly: Assembly) -> Games | None:
    if rl.environment is None:
        return None
    make, begin = environment_maker(rl.environment), _begin(assembly)
    return Games(rl.environment, make, assembly.tokenizer, begin, rl.max_prompt_tokens, rl.max_response_tokens)


def _recipe(rl: RlConfig, context: int, dtype: str) -> Recipe:
    axis, exact = "context" if context > 1 else None, dtype == "float32" and rl.mode != "overlap"
    recipe = rl.algorithm.recipe(
        rl.max_response_tokens, max_sequences=rl.responses_per_row, sequence_axis=axis, exact=exact
    )
    check_mode(rl, recipe)
    updates = rl.minibatches * rl.epochs
    if recipe.on_policy and updates > 1:
        raise ConfigError(
            f"rl.minibatches={rl.minibatches} x rl.epochs={rl.epochs} updates a policy {updates} times with the same "
            f"responses, but rl.algorithm.name={recipe.name} learns from those of the very same policy; set both to 1, "
            "or rl.algorithm.objective=ppo_clip"
        )
    if recipe.grouped and rl.samples_per_prompt < 2:
        raise ConfigError(
            f"rl.samples_per_prompt={rl.samples_per_prompt}, but rl.algorithm.name={recipe.name} compares the "
            "responses to a prompt; set it to 2 or more"
        )
    return recipe


def _check_divided_head(recipe: Recipe, sampling: Sampling) -> None:
    """Raises a ConfigError for what needs a rank that sees all logits."""
    for is_asked, option, way_out in (
        (sampling.truncates, "rl.sampling.top_k, top_p and min_p need", "leave these out"),
        (recipe.policy_loss.entropy_coefficient, "rl.algorithm.entropy_coefficient needs", "leave that out"),
        (recipe.value_loss, f"rl.algorithm.name={recipe.name} and its value head need", "take grpo, say"),
    ):
        if is_asked:
            raise ConfigError(
                f"pipeline.head=vocab_parallel has no rank that sees all logits, which {option}; set "
                f"pipeline.head=last_stage, or {way_out}"
            )


def _sampling_mesh(rl: RlConfig, topology: Topology, training: Mesh) -> Mesh:
    axes, devices, who = rl.sampling.axes, training.size, "that train"
    if rl.mode != "alternate":
        devices, who = topology.size - training.size, "that do not train"
        if not devices:
            raise ConfigError(
                f"rl.mode={rl.mode} samples on devices that do not train, and mesh.axes takes all {topology.size} of "
                f"mesh.topology={topology}; take a larger topology, or smaller axes"
            )
    others = axes.tensor * axes.expert
    data = devices // others if axes.data is None else axes.data
    if data * others != devices:
        sizes = " x ".join(f"{name} {size}" for name, size in (("tensor", axes.tensor), ("expert", axes.expert)))
        raise ConfigError(
            f"rl.sampling.axes: data {axes.data or 'the rest'} x {sizes} is not the {devices} devices {who}; "
            f"change one of them"
        )
    shape = {"data": data, "tensor": axes.tensor, "expert": axes.expert}
    if devices == topology.size:
        return make_mesh(place(topology, shape))
    chosen = training.devices.reshape(-1)
    if rl.mode != "alternate":
        walk = make_mesh(place(topology, {"data": topology.size})).devices.flat
        chosen = np.array([device for device in walk if device not in set(chosen)], object)
    return Mesh(chosen.reshape([shape.get(axis, 1) for axis in AXES]), AXES, axis_types=(AxisType.Auto,) * len(AXES))
