"""The run: reshard, sample, score, learn, record, save; and again.

`meshsys.rl.modes` has the orders in which that goes on.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from meshsys import distributed
from meshsys.assemble import Assembly, assemble, topology_of
from meshsys.checkpoint import Checkpoints
from meshsys.config import Config, to_yaml
from meshsys.errors import ConfigError
from meshsys.files import write_whole
from meshsys.mesh import ensure_devices, make_mesh
from meshsys.metrics import MetricsWriter
from meshsys.planner import plan_of
from meshsys.report import write_report
from meshsys.rl.algorithm_config import Recipe
from meshsys.rl.collect import Collected, Collector
from meshsys.rl.config import RlConfig
from meshsys.rl.environments import environment_maker
from meshsys.rl.games import Games, record_of_games
from meshsys.rl.learn import Learner, Mismatch, rows_of_an_update
from meshsys.rl.modes.alternate import Alternate
from meshsys.rl.modes.checks import check_mode
from meshsys.rl.modes.overlap import Overlap
from meshsys.rl.modes.periodic import Periodic, groups_of_a_part
from meshsys.rl.modes.shared_rewards import SharedRewards
from meshsys.rl.modes.transfer import Transfer
from meshsys.rl.progress import RlProgress
from meshsys.rl.prompts import PromptStream
from meshsys.rl.rewards import RewardPool
from meshsys.rl.sampler import OnSameDevices, Sampler
from meshsys.rl.speculative.sampling import Speculation, speculation_of
from meshsys.rl.tasks.mixture import Mixture
from meshsys.rl.tasks.registry import open_tasks
from meshsys.rl.transcripts import TranscriptWriter
from meshsys.rl.update import PolicyUpdate
from meshsys.run_folder import check_same_run, locked
from meshsys.sharding import BATCH_AXES
from meshsys.signals import StopSignals, stop_signals
from meshsys.state import State
from meshsys.torus import AXES, Topology, place
from models.sampling import Sampling

__all__ = ["run_rl"]


def run_rl(config: Config) -> int:
    """Learns to `train.steps`, going on from the run's newest checkpoint; returns the exit code.

    0 when the run is complete, 1 after a loss or gradient that is not finite or where sampler and trainer differ,
    128 + N after signal N. Must be called on the main thread.

    Raises:
        ConfigError: a configuration that cannot run; nothing has been written then.
    """
    rl = config.rl
    if rl is None:
        raise ConfigError("rl is missing; `meshsys rl` needs that section, with tasks at least")
    if distributed.count() > 1:
        raise ConfigError(f"{distributed.count()} processes: `meshsys rl` runs in one; start it once")
    topology = topology_of(config)
    ensure_devices(topology.size, f"mesh.topology={topology}")
    run = _prepared(config, rl, topology)
    folder = config.run_dir
    with run.rewards, locked(folder), stop_signals() as signals:
        checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
        try:
            return _run(run, checkpoints, folder, signals)
        finally:
            checkpoints.close()


@dataclass(frozen=True)
class _Run:
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


def _prepared(config: Config, rl: RlConfig, topology: Topology) -> _Run:
    axes = config.mesh.axes
    unit = config.pipeline.microbatches * math.prod(getattr(axes, axis) for axis in BATCH_AXES)
    rows = rows_of_an_update(rl, unit)
    if rl.mode == "periodic":
        rows = -(-groups_of_a_part(rl, unit) * rl.samples_per_prompt // unit) * unit
    length = rl.max_prompt_tokens + rl.max_response_tokens
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
    _prompt_stream(prompts, assembly, rl, games).take(1)
    update = PolicyUpdate(assembly, mesh, recipe.policy_loss, sampling, recipe.value_loss)
    rewards = RewardPool(rl.rewards, rl.reward_pool, scorers=() if games else prompts.scorers)
    drafts = speculation_of(rl, prompts, update, rows, config.run.seed)
    return _Run(config, rl, assembly, recipe, update, sampling_mesh, prompts, rewards, rows, drafts, games)


def _prompt_stream(
    prompts: Mixture, assembly: Assembly, rl: RlConfig, games: Games | None, at: int = 0
) -> PromptStream:
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
    recipe = rl.algorithm.recipe(rl.max_response_tokens, sequence_axis=axis, exact=exact)
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


def _run(run: _Run, checkpoints: Checkpoints, folder: Path, signals: StopSignals) -> int:
    config, rl, update = run.config, run.rl, run.update
    steps, every = config.train.steps, config.checkpoint.every
    restored = checkpoints.restore(
        lambda _: update.canonical(previous=False),
        lambda meta: check_same_run(run.assembly.config, meta, "rl"),
        lambda line: print(line, flush=True),
    )
    state, taken, version = update.init(), 0, 0
    position: dict[str, Any] = {"prompt": 0}
    speculation = run.speculation
    reference = state.params if run.recipe.kl else None
    if restored is not None:
        state, meta = update.from_canonical(restored[0]), restored[1]
        taken, version = meta["step"], meta["rl"].pop("version")
        position = meta["rl"]
        if speculation:
            speculation.drafts.load(restored[2])
        print(f"resuming {config.run.name} after step {taken}", flush=True)
    elif reference is not None:
        state = update.init()  # an update consumes its state
    write_whole(folder / "config.yaml", to_yaml(config))
    write_whole(folder / "plan.json", plan_of(run.assembly).to_json())

    tokenizer = run.assembly.tokenizer
    prompts = _prompt_stream(run.prompts, run.assembly, rl, run.games, position["prompt"])
    apart, slots = rl.mode != "alternate", rl.sampling.slots or rl.responses
    carrier = (
        Transfer(update, run.sampling_mesh)
        if apart
        else OnSameDevices(run.assembly, state.params, run.sampling_mesh, rl.reshard)
    )
    sampler = Sampler(run.assembly, run.sampling_mesh, carrier, slots=slots)
    refills, rewards = run.recipe.dynamic_sampling, SharedRewards(run.rewards)
    collector = Collector(
        rl,
        sampler,
        rewards if apart else run.rewards,
        tokenizer,
        refills=refills,
        seed=config.run.seed,
        speculation=speculation,
        games=run.games,
    )
    learner = Learner(rl, run.recipe, update, run.rows, reference)
    metrics, transcripts = MetricsWriter(folder, taken), TranscriptWriter(folder, taken, rl.transcripts)

    def save(state: State) -> None:
        meta = {"step": taken, "model": dataclasses.asdict(run.assembly.config.model)}
        meta |= {"rl": {**position, "version": version}}
        drafts = speculation.drafts.arrays() if speculation else {}
        # An update that was refused has counted itself all the same.
        kept = update.to_canonical(state._replace(step=state.step * 0 + version))
        checkpoints.save(taken, kept, meta, drafts)

    def mode_of(phase: Callable[[str], None]) -> Alternate | Overlap | Periodic:
        if rl.mode == "periodic":
            return Periodic(rl, run.recipe, update, sampler, collector, rewards, learner, prompts, run.rows)
        if rl.mode == "alternate":
            return Alternate(sampler, collector, learner, prompts, config.run.seed, phase)
        sides, again = (sampler, collector, rewards, learner, prompts), position.get("again", ())
        return Overlap(rl, *sides, slots=slots, steps=steps - taken, again=again, seed=config.run.seed)

    code = 0
    try:
        with RlProgress(taken, steps) as progress, closing(mode_of(progress.phase)) as mode:
            run.rewards.warm()
            signals.wait_for_step = True
            while taken < steps and signals.caught is None:
                step, begun = taken + 1, time.perf_counter()
                skipped = prompts.skipped
                if speculation:
                    speculation.begin(state.params, step)
                try:
                    stepped = mode.step(state, step, version)
                except Mismatch as mismatch:
                    state = state if mismatch.state is None else mismatch.state
                    progress.say(f"step {step}: {mismatch}; the state before it is saved")
                    code = 1
                    break
                state, collected, found = stepped.state, stepped.collected, stepped.metrics
                if not found.finite and not config.train.skip_nonfinite:
                    progress.say(
                        f"step {step} is not finite: {update.first_nonfinite(found)}; the state before it is saved. "
                        "Lower train.learning_rate, or set train.skip_nonfinite=true to skip such steps"
                    )
                    code = 1
                    break
                position = stepped.position
                version += rl.minibatches * rl.epochs
                drafted = speculation.commit() if speculation else {}
                ended = time.perf_counter()
                record = {
                    "step": step,
                    **_of_rewards(collected),
                    **record_of_games(collected.rollouts),
                    **stepped.learned,
                    **drafted,
                    "tokens": collected.tokens,
                    "tokens_per_s": collected.tokens / max(collected.sample_seconds, 1e-9),
                    "prompts_skipped": prompts.skipped - skipped,
                    "reshard_bytes": carrier.moved_bytes,
                    "reshard_changed": carrier.changed,
                    "reshard_seconds": carrier.seconds,
                    "sample_seconds": collected.sample_seconds,
                    "reward_seconds": collected.reward_seconds,
                    "train_seconds": stepped.train_seconds,
                    "step_seconds": ended - begun,
                    "compilations": sampler.compilations + update.compilations,
                    "policy_version": version,
                    **stepped.record,
                }
                if collected.failure:
                    failed = collected.errors + collected.timeouts + collected.crashes
                    progress.say(f"step {step}: {failed} rewards failed and count as 0; the first: {collected.failure}")
                metrics.write(record)
                transcripts.write(step, collected, collector.text)
                progress.update(record)
                taken = step
                if every and taken % every == 0:
                    save(state)
            save(state)
            if taken < steps and not code:
                caught = signals.caught or signal.SIGTERM
                code = 128 + caught
                progress.say(f"stopped by {caught.name} after step {taken}; the same command goes on from there")
    finally:
        metrics.close()
        transcripts.close()
    report = write_report(folder)
    print(f"{'complete' if taken >= steps else 'saved'} at step {taken}: {report}", flush=True)
    return code


def _of_rewards(collected: Collected) -> dict[str, Any]:
    rollouts = collected.rollouts
    return {
        "reward_mean": float(collected.score_N.mean()),
        "reward_std": float(collected.score_N.std()),
        **{f"reward/{name}": float(values.mean()) for name, values in collected.by_name.items()},
        "zero_variance_groups": collected.zero_variance_groups,
        "sampled_groups": collected.sampled_groups,
        "response_tokens_mean": float(np.mean([len(one.tokens) for one in rollouts])),
        "stopped_fraction": float(np.mean([one.has_stopped for one in rollouts])),
        "reward_errors": collected.errors,
        "reward_timeouts": collected.timeouts,
        "reward_crashes": collected.crashes,
    }
