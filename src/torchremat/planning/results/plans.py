"""A plan: its data, the verbs that put it on a model and take it off, and its views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from torchremat._compat.collectives import is_distributed
from torchremat.errors import PlanError, check_flags
from torchremat.json_data import digest_of
from torchremat.measuring.communication import known_groups
from torchremat.measuring.curves import draw
from torchremat.optimizing.module_runs import keeps_in_store
from torchremat.planning.layout import Application, check_bare, install, modules_under, put_on, uninstall, unmet_modules
from torchremat.planning.peers.peers import Group, Peers, check_group, peers_of
from torchremat.planning.results.plan_data import PlanData, file_of, plan_in
from torchremat.planning.results.plan_views import page_of, steps_of, text_of
from torchremat.planning.stepping import PLAIN_STEPPING, SteppingHandles, StepStores, optimizer_for
from torchremat.planning.store_profiles import check_step_stores, check_stores
from torchremat.planning.training.checks import CountedBytes, checks_on
from torchremat.regions.offload_schedule import OffloadSchedule
from torchremat.regions.settings import Settings
from torchremat.schedules.chain import DEEPEST, depth
from torchremat.tensors.handles import Store
from torchremat.tensors.sizes import format_bytes
from torchremat.views.page import Page
from torchremat.views.steps import Step
from torchremat.views.viewed import ViewedOverTime


@dataclass(frozen=True, kw_only=True)
class Plan(PlanData, ViewedOverTime):
    """A choice for a whole model under a budget. Made by `plan`, put on a model by `apply`.

    Its attributes are those of `Choice`, `Forecast` and `Provenance`. Bytes are absolute: they include the live bytes
    before the step.
    """

    def apply(
        self,
        model: nn.Module,
        *,
        stores: Sequence[Store] = (),
        allow_lossy: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        optimizer_store: Store | None = None,
        parameter_store: Store | None = None,
        group: Group = "step",
    ) -> None:
        """Put the plan on a model: the calls that it names become regions, or go to a store. Runs nothing.

        If the plan releases gradients, or stores the optimizer's state or parameters, the optimizer steps in this way
        from now on.

        Args:
            model: The model.
            stores: The stores to use, in the order in which they were given to `plan`. By default the stores that the
                plan was made with; a loaded plan has lost them.
            allow_lossy: Whether these may be lossy.
            optimizer: The optimizer that trains the model. By default the one that the plan was made with; a loaded
                plan has lost it. A plan that leaves its step alone needs none.
            optimizer_store: The store for its state. By default the one that the plan was made with.
            parameter_store: The store for parameters, likewise.
            group: The processes that have to put the same plan on their models, as for `plan`. By default those that
                have planned together; of a loaded plan, those that are known by the model's wrapper and parameters, or
                all, if they are as many as have planned. They compare their plans now, and in the first step.

        Raises:
            PlanError: The plan was made for another model (all differences are listed), or one is applied already, or
                the plan needs stores and these are not the ones, or it was made without stores, or its regions nest too
                deeply to run, or it needs an optimizer and has none, or parameters have waited in a store when it was
                made, and do not now.
            StepError: The optimizer has none of the model's parameters; or another process has another plan, or does
                not come.
            StoreError: The state, or a parameter, does not go into the store.
            UnsupportedError: One of the stores is no store, or is lossy and that is not allowed; or `allow_lossy` is
                neither True nor False; or the optimizer's gradients are released already; or see
                `release_gradients` and `offload_parameters`.
        """
        check_flags(allow_lossy=allow_lossy)
        given = check_stores(stores, allow_lossy=allow_lossy)
        self.check(model)
        check_bare(model)
        if self.is_of_stored and not keeps_in_store(model):
            raise PlanError(
                f"the plan was made while {format_bytes(self.away_bytes)} of parameters wait in a store, and here none "
                "do. Call `torchremat.offload_parameters` before `apply`, or plan again."
            )
        if depth(self.tree) > DEEPEST:  # See NOTE [ How deep regions may nest ]
            raise PlanError(
                f"the plan has regions that nest {depth(self.tree)} deep, more than the {DEEPEST} that Python's "
                "stack has room for. Plan again: this version makes no such plans."
            )
        offload_schedule = self._offload_schedule(given)
        peers = self._peers(model, group)
        self._compare(peers)
        handles = self._handles(model, optimizer, StepStores(state=optimizer_store, parameters=parameter_store))
        install(
            model,
            self.calls,
            self.tree,
            Settings(),
            held=self.held,
            inputs=self.inputs,
            conditions=self.conditions,
            rise_bytes=self.step_peak_bytes - sum(self.before_bytes.values()),
            gradient_bytes=self.before_bytes["gradients"],
            offload_schedule=offload_schedule,
            # Stores are measured on this machine, while the seconds of recomputes may be those of another device.
            slowdown=self.slowdown if self.stored else None,
            unmet=unmet_modules(model, self.calls),
            checks=checks_on(model, self._counted, partial(self._compare, peers)),
            stepping=self.stepping,
            handles=handles,
        )

    def _peers(self, model: nn.Module, group: Group) -> Peers:
        """Return the processes that have to put the same plan on their models."""
        check_group(group)
        known = known_groups([model], ())
        if group == "step" and self.processes > 1 and is_distributed():
            world = torch.distributed.get_world_size()
            if self.ranks:
                known.add(self.ranks)
            elif world == self.processes:
                known.add(tuple(range(world)))
            elif not known:
                raise PlanError(
                    f"the plan was made by {self.processes} processes together, and is loaded in one of {world}: which "
                    "of them have to have the same plan? Say it by `apply(model, group=...)`, a process group."
                )
        return peers_of(known, group, "putting a plan on")

    def _compare(self, peers: Peers) -> None:
        """Raise in all processes that have to have this plan if one of them has another."""
        if peers.are_several:
            peers.check_equal(
                "the plan",
                digest_of(self._application),
                "Processes that communicate have to recompute the same, or they exchange tensors in different orders: "
                "plan in all of them together, or load one file in all of them.",
            )

    def _handles(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, given: StepStores
    ) -> Callable[[], SteppingHandles] | None:
        """Return what lets the optimizer step in the way of the plan; None if it steps plainly."""
        check_step_stores(given)
        for name, store, planned, what in (
            ("optimizer_store", given.state, self.optimizer_store, "the optimizer's state"),
            ("parameter_store", given.parameters, self.parameter_store, "parameters"),
        ):
            if store is not None and not planned:
                raise PlanError(
                    f"the plan was made without a store for {what}, so the one given here would hold nothing. Leave "
                    f"`{name}` out, or pass it when you plan."
                )
        if self.stepping == PLAIN_STEPPING:
            return None
        trains = optimizer_for(model, self.stepping, optimizer or self.given_optimizer.get())
        stores = StepStores(
            state=given.state or self.given_optimizer_store, parameters=given.parameters or self.given_parameter_store
        )
        if self.stepping.stores and stores.state is None:
            raise PlanError(
                f"the plan puts the optimizer's state into a store, and was made with {self.optimizer_store}; none is "
                "given. Call `apply(model, optimizer=..., optimizer_store=...)` with a store like it."
            )
        if self.stepping.stores_parameters and stores.parameters is None:
            raise PlanError(
                f"the plan puts parameters into a store, and was made with {self.parameter_store}; none is given. Call "
                "`apply(model, optimizer=..., parameter_store=...)` with a store like it."
            )
        return partial(SteppingHandles, model, trains, self.stepping, stores)

    @property
    def _counted(self) -> CountedBytes:
        return CountedBytes(
            device=self.device,
            budget_bytes=self.budget_bytes,
            peak_bytes=self.peak_bytes,
            state_bytes=self.before_bytes.get("optimizer", 0),
            has_optimizer=self.optimizer_peak_bytes is not None,
            bucket_bytes=self.before_bytes.get("communication", 0),
            gradient_bytes=self.before_bytes["gradients"],
            recomputes=bool(self.recomputed_calls or self.recomputed_flops or self.stored),
        )

    def _offload_schedule(self, given: tuple[Store, ...]) -> OffloadSchedule | None:
        """Return when which units are stored. The given stores must be those of the plan, even if it uses none."""
        if given and not self.stores:
            raise PlanError(
                f"the plan was made without stores, so the {len(given)} given here would hold nothing. Leave "
                "`stores=[...]` or `--store` out, or pass them when you plan."
            )
        stores = given or self.given_stores
        if len(stores) != len(self.stores) and (given or self.stored):
            raise PlanError(
                f"the plan puts {len(self.stored)} units into stores and was made with {len(self.stores)} of them, "
                f"[{', '.join(self.stores)}]; {len(stores)} are given. Call `apply(model, stores=[...])` with stores "
                "like these, in this order, or `--store` for each on the command line."
            )
        return OffloadSchedule(stores, self.transfers) if self.stored else None

    def remove(self, model: nn.Module) -> None:
        """Take the plan off a model, which is then as it was before.

        Other wrappers on the model stay: modules that were wrapped since.

        Raises:
            PlanError: The plan is not on the model, or was made for another one.
            StoreError: The optimizer's state cannot be brought back.
            UnsupportedError: A backward has released gradients, and `optimizer.step()` did not follow.
        """
        if not isinstance(model, nn.Module) or not self.is_on(model):  # pyright: ignore[reportUnnecessaryIsInstance]
            self.check(model)
            raise PlanError(
                f"this plan is not on the model. On it is {put_on(model)}. Remove the plan that was applied, or take "
                "all off by `unwrap(model)`."
            )
        uninstall(model, self._application)

    def is_on(self, model: nn.Module) -> bool:
        """Return whether the plan, or one that does the same, is on a model, or was on the one that it is a copy of."""
        return bool(modules_under(model, self._application))

    @property
    def _application(self) -> Application:
        return Application(
            calls=self.calls, tree=self.tree, held=self.held, transfers=self.transfers, stepping=self.stepping
        )

    def check(self, model: nn.Module) -> None:
        """Raise a PlanError that lists all differences if the plan was made for another model."""
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
            raise PlanError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
        here = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        there = self.parameters
        problems = [f"`{name}` is missing in the model" for name in there if name not in here]
        problems += [f"`{name}` is not in the plan" for name in here if name not in there]
        problems += [
            f"`{name}` has shape {here[name]}, the plan was made for {there[name]}"
            for name in here
            if name in there and here[name] != there[name]
        ]
        modules = {name for name, _ in model.named_modules()}
        calls = (*(call for unit in self.calls.units for call in unit), *self.calls.others, *self.calls.opened)
        named = {call.name for call in calls} | set(self.calls.roots)
        problems += [f"there is no module `{name}`" for name in sorted(named - modules)]
        if problems:
            shown = "\n".join(f"  {problem}" for problem in problems[:12])
            more = f"\n  ... and {len(problems) - 12} more" if len(problems) > 12 else ""
            raise PlanError(f"the plan was made for another model; {len(problems)} differences:\n{shown}{more}")

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, readable and diffable.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_text(file_of(replace(self, certified=self.certificate)))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Return the plan in a file; nothing in it is executed.

        Raises:
            PlanError: The file is no plan, is damaged, or was written by a newer version.
        """
        try:
            text = Path(path).read_text()
        except (OSError, ValueError) as error:  # no text, or no name of a file
            raise PlanError(f"{path}: cannot be read as a plan: {error}.") from error
        return plan_in(text, Plan, source=str(path))

    def plot(self, path: str | Path) -> None:
        """Draw the predicted step, plain and planned side by side, into an image file; its extension sets the format.

        The peaks in the headings are those of `print(plan)`: the plain step's peak is the measured one if it was
        measured.

        Raises:
            UnsupportedError: matplotlib is not installed.
        """
        draw(self.drawn, path)

    @property
    def drawn(self) -> tuple[Step, Step]:
        """The predicted step ready to draw, plain and planned, with the numbers that `print` has."""
        plain, planned = steps_of(self)
        # The curve covers only forward and backward.
        by_optimizer = ", in the optimizer's step" if self.is_by_optimizer else ""
        budget = f"budget {format_bytes(self.budget_bytes)}, {self.slowdown:.2f} x plain"
        return (
            replace(
                plain,
                name=f"plain\npeak {format_bytes(self.plain_peak_bytes)} {self.plain_source}",
                budget_bytes=self.budget_bytes,
            ),
            replace(planned, name=f"{budget}\npeak {format_bytes(self.peak_bytes)} predicted{by_optimizer}"),
        )

    def _page(self) -> Page:
        return page_of(self)

    def _steps(self) -> Sequence[Step]:
        return steps_of(self)

    def __repr__(self) -> str:
        return (
            f"<Plan: budget {format_bytes(self.budget_bytes)} ({self.budget}) on {self.device}, peak "
            f"{format_bytes(self.peak_bytes)} predicted, {self.slowdown:.2f} x plain, {len(self.units)} units>"
        )

    def __str__(self) -> str:
        return text_of(self)
