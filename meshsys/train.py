"""The training loop: assemble, resume, step, record, save."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from meshsys import distributed
from meshsys.assemble import Assembly, assemble, topology_of
from meshsys.checkpoint import Checkpoints
from meshsys.config import Config, to_yaml
from meshsys.data import Loader, make_loader
from meshsys.errors import ConfigError
from meshsys.files import write_whole
from meshsys.mesh import ensure_devices, make_mesh
from meshsys.metrics import MetricsWriter
from meshsys.planner import Plan, plan_of
from meshsys.progress import RunProgress
from meshsys.report import write_report
from meshsys.run_folder import check_same_run, locked
from meshsys.searched import RECORD
from meshsys.signals import StopSignals, stop_signals
from meshsys.state import State
from meshsys.step import Step

__all__ = ["train"]


def train(config: Config) -> int:
    """Trains to `train.steps`, going on from the run's newest checkpoint; returns the exit code.

    0 when the run is complete, 1 after a loss or gradient that is not finite, 128 + N after signal N. Must be called
    on the main thread, which Python gives the signals to.

    Where the environment speaks of several processes (`meshsys.distributed`), all call this.

    Raises:
        ConfigError: a configuration that cannot run; nothing has been written then.
    """
    distributed.join(os.environ)
    topology = topology_of(config)
    ensure_devices(topology.size, f"mesh.topology={topology}")  # tracing starts JAX, to ask what it runs on
    assembly = assemble(config)
    mesh = make_mesh(assembly.placement)
    plan = plan_of(assembly)
    _check_same_everywhere(config, plan)
    _check_memory(config, plan, mesh)
    loader = _loader(assembly)
    step = Step(assembly, mesh)
    folder = config.run_dir
    with distributed.entered_by_first(locked(folder)), stop_signals() as signals:
        checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
        try:
            return _run(assembly, plan, step, loader, checkpoints, folder, signals)
        finally:
            checkpoints.close()


def _run(
    assembly: Assembly,
    plan: Plan,
    step: Step,
    loader: Loader,
    checkpoints: Checkpoints,
    folder: Path,
    signals: StopSignals,
) -> int:
    config = assembly.config
    steps, every = config.train.steps, config.checkpoint.every

    restored = checkpoints.restore(
        lambda meta: step.canonical(previous=meta.get("previous", False)),
        lambda meta: check_same_run(config, meta),
        _print,
    )
    if restored is None:
        state, taken = step.init(), 0
    else:
        loader.restore(restored[1]["data"])
        state = step.from_canonical(restored[0])
        taken = int(state.step)
        _print(f"resuming {config.run.name} after step {taken}")
    if loader.note:
        _print(f"data.source={config.data.source}: {loader.note}")
    first = distributed.is_first()
    if first:
        write_whole(folder / "config.yaml", to_yaml(config))
        write_whole(folder / "plan.json", plan.to_json())
        if assembly.search_record is not None:
            write_whole(folder / RECORD, assembly.search_record)
    metrics = MetricsWriter(folder, taken) if first else None

    def save(taken: int, state: State, position: dict[str, Any]) -> None:
        kept = step.to_canonical(state._replace(step=state.step * 0 + taken))
        meta = {"step": taken, "model": dataclasses.asdict(config.model), "data": position}
        checkpoints.save(taken, kept, meta | {"previous": kept.previous is not None})

    code, position = 0, loader.state()
    following = next(loader)
    try:
        with RunProgress(taken, steps, _said, quiet=not first) as progress:
            if taken < steps:
                progress.say(f"compiling {config.run.name} for {assembly.placement.size} devices")
                step.compile()
            signals.wait_for_step = True
            while taken < steps and not distributed.any_of(signals.caught is not None):
                begun = time.perf_counter()
                batch, reached, following = following, loader.state(), next(loader)
                state, measured = step(state, batch, following)
                measured = jax.device_get(measured)
                seconds = time.perf_counter() - begun
                record = {
                    "step": taken + 1,
                    "loss": float(measured.loss),
                    "grad_norm": float(measured.grad_norm),
                    "learning_rate": float(measured.learning_rate),
                    "tokens": int(measured.tokens),
                    "tokens_per_s": int(measured.tokens) / seconds,
                    "step_seconds": seconds,
                }
                if not measured.finite and not config.train.skip_nonfinite:
                    progress.say(
                        f"step {taken + 1} is not finite: {step.first_nonfinite(measured)}; the state before it is "
                        "saved. Lower train.learning_rate, or set train.skip_nonfinite=true to skip such steps"
                    )
                    code = 1
                    break
                if metrics is not None:
                    metrics.write(record)
                progress.update(record)
                taken, position = taken + 1, reached
                if every and taken % every == 0:
                    save(taken, state, position)
            save(taken, state, position)
            if taken < steps and not code:
                caught = signals.caught or signal.SIGTERM  # of another process
                code = 128 + caught
                progress.say(f"stopped by {caught.name} after step {taken}; the same command goes on from there")
    finally:
        if metrics is not None:
            metrics.close()
    if first:
        report = write_report(folder)
        _print(f"{'complete' if taken >= steps else 'saved'} at step {taken}: {report}")
    return code


def _said(record: dict[str, Any]) -> str:
    return f"loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tokens/s"


def _loader(assembly: Assembly) -> Loader:
    config = assembly.config
    return make_loader(
        source=config.data.source,
        tokenizer=assembly.tokenizer,
        text_field=config.data.text_field,
        sequence_length=config.data.sequence_length,
        batch_size=config.data.batch_size,
        seed=config.run.seed,
        format=config.data.format,
        too_long=config.data.too_long,
    )


def _check_memory(config: Config, plan: Plan, mesh: Mesh) -> None:
    """Fake devices share the host's memory, and what is too large ends without a word; the plan is no upper bound."""
    if mesh.devices.flat[0].platform != "cpu":
        return
    needed = plan.memory.total * mesh.size / 2**30
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if needed > 2 * have:
        model, data = config.model, config.data
        raise ConfigError(
            f"model.layers={model.layers}, model.d_model={model.d_model}, model.d_ff={model.d_ff}, model.vocab_size="
            f"{model.vocab_size}, data.batch_size={data.batch_size} and data.sequence_length={data.sequence_length} "
            f"need about {needed:,.0f} GiB on {mesh.size} CPU devices, and this machine has {have:,.0f} GiB; "
            "lower some of them"
        )


def _check_same_everywhere(config: Config, plan: Plan) -> None:
    processes = distributed.count()
    if processes == 1:
        return
    if plan.mesh.devices % processes or plan.mesh.devices != plan.mesh.devices_used:
        raise ConfigError(
            f"mesh.topology={config.mesh.topology} has {plan.mesh.devices} devices, of which the axes use "
            f"{plan.mesh.devices_used}; {processes} processes need all of them, the same number each"
        )
    if not distributed.same_for_all(to_yaml(config) + plan.to_json()):
        raise ConfigError(
            f"run.name={config.run.name}: its {processes} processes have different configurations or schedules; "
            "give them all the same file, and a schedule that was searched for before as pipeline.schedule=csv:PATH"
        )


def _print(line: str) -> None:
    if distributed.is_first():
        print(line, flush=True)
