"""The options of an algorithm, and what they come to.

An option that is left out has the algorithm's own value. One that the algorithm would not use, or that would do
nothing, is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from meshsys.config_file import INT32_MAX, Section, one_of, show_value
from meshsys.errors import ConfigError
from meshsys.rl.advantages import Advantages, Episodes
from meshsys.rl.aggregation import AGGREGATIONS
from meshsys.rl.algorithms import ADVANTAGES, ALGORITHMS, OBJECTIVES, Algorithm
from meshsys.rl.importance import Importance
from meshsys.rl.kl import Estimator, KlPenalty, Place
from meshsys.rl.objectives import Objective, PolicyLoss
from meshsys.rl.values import ValueLoss

__all__ = ["AlgorithmConfig", "ImportanceConfig", "KlConfig", "Recipe"]

_LARGEST = 1e6
_PLACES: dict[Estimator, Place] = {"k1": "reward", "k2": "loss", "k3": "loss"}  # where each penalises; see kl.py
_ESTIMATORS: dict[Place, Estimator] = {"reward": "k1", "loss": "k2"}
_VALUE_OPTIONS = {"value_clip": 0.2, "value_coefficient": 0.1}


@dataclass(frozen=True)
class Recipe:
    """An algorithm with every option resolved, in the order in which a step uses it.

    Attributes:
        name: the algorithm's.
        dynamic_sampling: whether prompts whose responses all score the same are replaced by others.
        grouped: whether advantages need `Episodes.group_N`; groups have 2 members or more.
        whole: whether advantages need the scores of all responses of a step.
        on_policy: whether a batch is good for one update only.
        overlong_buffer: tokens before the longest response over which `overlong_penalty` grows; 0 for no penalty.
        kl: the penalty, which needs the reference's log-probabilities: for the scores if it is in the reward, for
            `policy_loss` otherwise. None for none.
        advantage: the advantages of a batch.
        importance: the weights against a sampler that differs.
        aggregation: for `meshsys.rl.aggregation.token_weights`.
        policy_loss: the loss of each token.
        value_loss: that of the value model, which the advantages need too; None without one.
    """

    name: str
    dynamic_sampling: bool
    grouped: bool
    whole: bool
    on_policy: bool
    overlong_buffer: int
    kl: KlPenalty | None
    advantage: Callable[[Episodes], Advantages]
    importance: Importance
    aggregation: str
    policy_loss: PolicyLoss
    value_loss: ValueLoss | None


class KlConfig(Section):
    """The penalty for leaving the reference, the policy that the run started from.

    Attributes:
        coefficient: of the penalty; 0 for none, and no reference is kept.
        estimator: `k1`, the difference of log-probabilities; `k2`, half its square; `k3`, Schulman's.
        place: whether it is taken from the `reward`, for k1, or added to the `loss`, for k2 and k3; null means the
            place of the estimator.
    """

    coefficient: float | None = Field(default=None, ge=0, le=_LARGEST)
    estimator: Estimator | None = None
    place: Place | None = None


class ImportanceConfig(Section):
    """The correction for a sampler whose log-probabilities differ from the trainer's.

    Attributes:
        mode: `truncate` weights above the cap to the cap, `mask` those outside floor and cap to 0, or `none`; null
            means `none` with float32 models, which sampler and trainer compute alike, and otherwise `truncate`.
        level: a weight for each `token`, or for a `sequence`, the geometric mean of its tokens'.
        cap: the largest weight; null means 2.
        floor: the smallest, for mode `mask`; null means 0.5.
    """

    mode: Literal["none", "truncate", "mask"] | None = None
    level: Literal["token", "sequence"] | None = None
    cap: float | None = Field(default=None, gt=0, le=_LARGEST)
    floor: float | None = Field(default=None, ge=0, le=_LARGEST)


class AlgorithmConfig(Section):
    """How the policy learns from what it sampled. Null means the algorithm's own value.

    Attributes:
        name: `grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce_plus_plus`,
            `reinforce_plus_plus_baseline` or `ppo`.
        objective: the loss of a token: `ppo_clip`, `gspo`, `cispo` or `reinforce`.
        aggregation: how token losses become one: `token_mean`, `sequence_mean_token_mean`, `sequence_mean_token_sum`
            or `sequence_mean_token_sum_norm`.
        clip_low: the ratio of policy to old policy is held above 1 - clip_low.
        clip_high: and below 1 + clip_high.
        dual_clip: the largest ratio that counts where the advantage is negative; null means no limit.
        normalize_advantages: divide by the standard deviation: of the group, or of the batch after its mean is taken.
        gamma: discount of rewards from one token to the next.
        gae_lambda: how far advantages look beyond what the value model expects.
        value_clip: how far a value may move from the old one in an update and still gain.
        value_coefficient: of the value model's loss.
        entropy_coefficient: of a bonus for entropy; 0 for none.
        dynamic_sampling: replace prompts whose responses all score the same.
        overlong_buffer: tokens before the longest response over which the score falls by up to 1; 0 for none.
        kl: the penalty for leaving the reference.
        importance: the correction for a sampler that differs from the trainer.
    """

    name: str = "grpo"
    objective: str | None = None
    aggregation: str | None = None
    clip_low: float | None = Field(default=None, gt=0, le=1)
    clip_high: float | None = Field(default=None, gt=0, le=_LARGEST)
    dual_clip: float | None = Field(default=None, gt=1, le=_LARGEST)
    normalize_advantages: bool | None = None
    gamma: float | None = Field(default=None, ge=0, le=1)
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    value_clip: float | None = Field(default=None, gt=0, le=_LARGEST)
    value_coefficient: float | None = Field(default=None, gt=0, le=_LARGEST)
    entropy_coefficient: float = Field(default=0.0, ge=0, le=_LARGEST)
    dynamic_sampling: bool | None = None
    overlong_buffer: int | None = Field(default=None, ge=0, le=INT32_MAX)
    kl: KlConfig = Field(default_factory=KlConfig)
    importance: ImportanceConfig = Field(default_factory=ImportanceConfig)

    @field_validator("name")
    @classmethod
    def _is_an_algorithm(cls, name: str) -> str:
        return one_of(ALGORITHMS, name, "known algorithm")

    @field_validator("objective")
    @classmethod
    def _is_an_objective(cls, objective: str | None) -> str | None:
        return objective if objective is None else one_of(OBJECTIVES, objective, "known objective")

    @field_validator("aggregation")
    @classmethod
    def _is_an_aggregation(cls, aggregation: str | None) -> str | None:
        return aggregation if aggregation is None else one_of(AGGREGATIONS, aggregation, "known aggregation")

    @model_validator(mode="after")
    def _every_option_is_used(self) -> Self:
        algorithm = ALGORITHMS[self.name]
        advantage, objective = ADVANTAGES[algorithm.advantage], self.objective or algorithm.objective
        for option in ("clip_low", "clip_high", "dual_clip"):
            if option not in OBJECTIVES[objective].defaults:
                users = [name for name, kind in OBJECTIVES.items() if option in kind.defaults]
                self._refuse(option, f"objective={objective}", "objective", users)
        for option in ("normalize_advantages", "gamma", "gae_lambda"):
            if option not in advantage.options:
                users = [name for name, kind in ADVANTAGES.items() if option in kind.options]
                self._refuse(option, f"name={self.name}", "name", _algorithms(users))
        valued = [name for name, kind in ADVANTAGES.items() if kind.valued]
        for option in _VALUE_OPTIONS:
            if not advantage.valued:
                self._refuse(option, f"name={self.name}", "name", _algorithms(valued))
        if self.dynamic_sampling and not advantage.grouped:
            grouped = [name for name, kind in ADVANTAGES.items() if kind.grouped]
            self._refuse("dynamic_sampling", f"name={self.name}", "name", _algorithms(grouped))
        return self

    @model_validator(mode="after")
    def _the_penalty_penalises(self) -> Self:
        kl, resolved = self.kl, self._kl_penalty(ALGORITHMS[self.name])
        if resolved is None:
            for option in ("estimator", "place"):
                if (value := getattr(kl, option)) is not None:
                    raise ValueError(
                        f"rl.algorithm.kl.{option}={value} does nothing, as rl.algorithm.kl.coefficient is 0; "
                        f"set that above 0, as in 0.01, or leave {option} out"
                    )
        elif _PLACES[resolved.estimator] != resolved.place:
            estimator, place = resolved.estimator, resolved.place
            way_out = (
                f"use rl.algorithm.kl.estimator={_ESTIMATORS[place]}, or rl.algorithm.kl.place={_PLACES[estimator]}"
            )
            if place == "loss":
                raise ValueError(
                    f"rl.algorithm.kl.estimator=k1 with rl.algorithm.kl.place=loss penalises nothing: the expected "
                    f"gradient of k1 is 0; {way_out}"
                )
            raise ValueError(
                f"rl.algorithm.kl.estimator={estimator} with rl.algorithm.kl.place=reward hardly penalises: near the "
                f"reference, its effect on the policy vanishes to first order; {way_out}"
            )
        return self

    @model_validator(mode="after")
    def _the_correction_corrects(self) -> Self:
        correction = self.importance
        mode = correction.mode or "truncate"
        unused = {"none": ("level", "cap", "floor"), "truncate": ("floor",), "mask": ()}[mode]
        for option in unused:
            if (value := getattr(correction, option)) is not None:
                use = "mask" if option == "floor" else "truncate or mask"
                raise ValueError(
                    f"rl.algorithm.importance.{option}={show_value(value)} is not used by rl.algorithm.importance.mode="
                    f"{mode}; leave it out, or set mode to {use}"
                )
        resolved = self._importance(exact=False)
        if resolved.mode == "mask" and resolved.floor >= resolved.cap:
            raise ValueError(
                f"rl.algorithm.importance.floor={resolved.floor:g} leaves no weight below rl.algorithm.importance.cap="
                f"{resolved.cap:g}; lower the floor, or raise the cap"
            )
        return self

    def recipe(
        self, max_tokens: int, *, max_sequences: int = 1, sequence_axis: str | None = None, exact: bool = False
    ) -> Recipe:
        """The algorithm with every option resolved.

        Args:
            max_tokens: the longest that a response may be.
            max_sequences: the most that a row of a batch holds, for objectives on sequences.
            sequence_axis: a manual mesh axis that rows are divided over; None for none.
            exact: whether sampler and trainer compute the same log-probabilities.

        Raises:
            ConfigError: an overlong buffer that no response fits in front of.
        """
        algorithm = ALGORITHMS[self.name]
        advantage = ADVANTAGES[algorithm.advantage]
        kl = self._kl_penalty(algorithm)
        given = {name: value for name in advantage.options if (value := getattr(self, name)) is not None}
        values = {name: _or(getattr(self, name), own) for name, own in _VALUE_OPTIONS.items()}
        return Recipe(
            name=self.name,
            dynamic_sampling=_or(self.dynamic_sampling, algorithm.dynamic_sampling),
            grouped=advantage.grouped,
            whole=advantage.whole,
            on_policy=OBJECTIVES[self.objective or algorithm.objective].on_policy,
            overlong_buffer=self._overlong_buffer(algorithm, max_tokens),
            kl=kl,
            advantage=partial(advantage.estimate, **given),
            importance=self._importance(exact=exact),
            aggregation=self.aggregation or algorithm.aggregation,
            policy_loss=PolicyLoss(
                self._objective(algorithm, max_sequences, sequence_axis),
                kl if kl and kl.place == "loss" else None,
                self.entropy_coefficient,
            ),
            value_loss=ValueLoss(values["value_coefficient"], values["value_clip"]) if advantage.valued else None,
        )

    # Refusing

    def _refuse(self, option: str, user: str, chooser: str, users: list[str]) -> None:
        if (value := getattr(self, option)) is not None:
            raise ValueError(
                f"rl.algorithm.{option}={show_value(value)} is not used by rl.algorithm.{user}; leave it out, or set "
                f"rl.algorithm.{chooser} ({', '.join(users)})"
            )

    # Resolving

    def _kl_penalty(self, algorithm: Algorithm) -> KlPenalty | None:
        own = algorithm.kl
        coefficient = _or(self.kl.coefficient, own.coefficient if own else 0.0)
        if not coefficient:
            return None
        estimator, place = self.kl.estimator, self.kl.place
        if estimator is None:
            estimator = own.estimator if own and place in (None, own.place) else _ESTIMATORS[place or "loss"]
        if place is None:
            place = _PLACES[estimator]
        return KlPenalty(coefficient, estimator, place)

    def _importance(self, *, exact: bool) -> Importance:
        own, given = Importance(), self.importance
        has_bounds = any(bound is not None for bound in (given.level, given.cap, given.floor))
        mode = given.mode or ("none" if exact and not has_bounds else own.mode)
        return Importance(mode, _or(given.level, own.level), _or(given.cap, own.cap), _or(given.floor, own.floor))

    def _objective(self, algorithm: Algorithm, max_sequences: int, sequence_axis: str | None) -> Objective:
        name = self.objective or algorithm.objective
        kind = OBJECTIVES[name]
        options: dict[str, Any] = {**kind.defaults}
        if name == algorithm.objective and algorithm.clip_high is not None:
            options["clip_high"] = algorithm.clip_high
        options.update({option: value for option in options if (value := getattr(self, option)) is not None})
        if kind.of_sequences:
            options.update(max_sequences=max_sequences, axis=sequence_axis)
        return kind.make(**options)

    def _overlong_buffer(self, algorithm: Algorithm, max_tokens: int) -> int:
        buffer = _or(self.overlong_buffer, int(algorithm.overlong_share * max_tokens))
        if buffer >= max_tokens:
            raise ConfigError(
                f"rl.algorithm.overlong_buffer={buffer} punishes every response of up to {max_tokens} tokens; lower "
                f"it, as to {max(max_tokens // 5, 1)}, or sample longer ones"
            )
        return buffer


def _algorithms(advantages: list[str]) -> list[str]:
    """Those that have one of the advantages."""
    return [name for name, algorithm in ALGORITHMS.items() if algorithm.advantage in advantages]


def _or(given: Any, own: Any) -> Any:
    return own if given is None else given
