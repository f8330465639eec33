"""The run: reshard, sample, score, learn, record, save; and again.

`meshsys.rl.modes` has the orders in which that goes on.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from meshsys import distributed
from meshsys.assemble import topology_of
from meshsys.checkpoint import Checkpoints
from meshsys.config import Config, to_yaml
from meshsys.errors import ConfigError
from meshsys.files import write_whole
from meshsys.mesh import ensure_devices
from meshsys.metrics import MetricsWriter
from meshsys.planner import plan_of
from meshsys.progress import RunProgress
from meshsys.report import write_report
from meshsys.rl.collect import Collected, Collector
from meshsys.rl.games import record_of_games
from meshsys.rl.learn import Learner, Mismatch
from meshsys.rl.modes.alternate import Alternate
from meshsys.rl.modes.overlap import Overlap
from meshsys.rl.modes.periodic import Periodic
from meshsys.rl.modes.shared_rewards import SharedRewards
from meshsys.rl.modes.transfer import Transfer
from meshsys.rl.prepare import Prepared, prepare, prompt_stream
from meshsys.rl.sampler import OnSameDevices, Sampler
from meshsys.rl.transcripts import TranscriptWriter
from meshsys.run_folder import check_same_run, locked
from meshsys.signals import StopSignals, stop_signals
from meshsys.state import State

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
    run = prepare(config, rl, topology)
    folder = config.run_dir
    with run.rewards, locked(folder), stop_signals() as signals:
        checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
        try:
            return _run(run, checkpoints, folder, signals)
        finally:
            checkpoints.close()


def _run(run: Prepared, checkpoints: Checkpoints, folder: Path, signals: StopSignals) -> int:
    config, rl, update = run.config, run.rl, run.update
    steps, every = config.train.steps, config.checkpoint.every
    restored = checkpoints.restore(
        lambda _: update.canonical(previous=False),
        lambda meta: check_same_run(run.assembly.config, meta, "rl"),
        lambda line: print(line, flush=True),
    )
    taken, version = 0, 0
    position: dict[str, Any] = {"prompt": 0}
    speculation = run.speculation
    reference = update.init().params if run.recipe.kl else None  # its own copy, as an update consumes its state
    if restored is None:
        state = update.init()
    else:
        state, meta = update.from_canonical(restored[0]), restored[1]
        taken, version = meta["step"], meta["rl"].pop("version")
        position = meta["rl"]
        if speculation:
            speculation.drafts.load(restored[2])
        print(f"resuming {config.run.name} after step {taken}", flush=True)
    write_whole(folder / "config.yaml", to_yaml(config))
    write_whole(folder / "plan.json", plan_of(run.assembly).to_json())

    tokenizer = run.assembly.tokenizer
    prompts = prompt_stream(run.prompts, run.assembly, rl, run.games, position["prompt"])
    apart, slots = rl.mode != "alternate", rl.sampling.slots or rl.responses
    carrier = (
        Transfer(update, run.sampling_mesh)
        if apart
        else OnSameDevices(run.assembly, state.params, run.sampling_mesh, rl.reshard)
    )
    sampler = Sampler(run.assembly, run.sampling_mesh, carrier, slots=slots, compacts=rl.sampling.compact)
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
        with RunProgress(taken, steps, _said) as progress, closing(mode_of(progress.phase)) as mode:
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
                        f"step {step} is not finite: {update.first_nonfinite(found)}; the state before that is saved. "
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


def _said(record: dict[str, Any]) -> str:
    reward, length, speed = (record[name] for name in ("reward_mean", "response_tokens_mean", "tokens_per_s"))
    return f"reward {reward:.3f}  {length:.1f} tokens each  {speed:,.0f} tokens/s"


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
