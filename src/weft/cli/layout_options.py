"""The layout of a run, as commands are given it: read, checked, and turned into processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from weft.cli.options import RULES, SCHEDULES, ReplicaOptions, flags_of
from weft.errors import ConfigError, WeftError, not_accepted
from weft.plan.layout import AUTO, DispatchRule, parse_layout
from weft.plan.layout import Layout as ReplicaLayouts
from weft.plan.pipeline.build import Schedule
from weft.processes import are_idle, visible_gpus
from weft.report.readable import print_line

if TYPE_CHECKING:
    from weft.model.resolve import ResolvedModel
    from weft.parallel.auto_layout import ChosenLayout, Machine
    from weft.parallel.replicas.following_engine import LayoutKeeper
    from weft.parallel.replicas.hosts import ReplicaHosts
    from weft.parallel.replicas.joined_stages import JoinedStages
    from weft.parallel.replicas.rank_group import RankGroup
    from weft.parallel.stages.load_stages import StageLayout
    from weft.plan.level import PlannedReplicas
    from weft.plan.replan import Forecaster, Prediction
    from weft.plan.sweep.forecast import PackForecaster
    from weft.spec import BackboneSpec, JobSpec, RunSpec

WHERE = "--layout"


@dataclass(frozen=True)
class LayoutOptions:
    layout: str | None = None
    schedule: str | None = None
    devices: str | None = None
    """Numbers of the GPUs, separated by commas; None: the first ones."""
    planned: PlannedReplicas | None = None
    dispatch: str | None = None
    may_be_auto: bool = True
    """True if the verb can choose a layout."""
    num_lessened: int = 0
    """As in `StageLayout`."""
    listen: str | None = None
    """Address where its processes join."""
    cluster: str | None = None
    """Ray cluster where its processes are; with neither, they are processes of this machine."""
    gpu_type: str | None = None

    @classmethod
    def read(
        cls, layout: str | None, replicas: str | None, there: ReplicaOptions, schedule: str | None, dispatch: str | None
    ) -> tuple[ReplicaOptions, LayoutOptions]:
        """Options of replicas, and of the layout; `there`: where processes are, which belongs to the layout if any."""
        if layout is None:
            return replace(there, replicas=replicas), cls(None, schedule, dispatch=dispatch)
        found = cls(layout, schedule, there.devices, dispatch=dispatch)
        found = replace(found, listen=there.listen, cluster=there.cluster, gpu_type=there.gpu_type)
        return ReplicaOptions(replicas), found

    def lessened(self, number: int) -> LayoutOptions:
        return replace(self, num_lessened=number)

    def idle_note(self, device: str) -> str | None:
        """A note for a run without a layout on a machine whose other GPUs are free."""
        gpus = visible_gpus()
        if self.layout is not None or device == "cpu" or len(gpus) < 2 or not are_idle(gpus[1:]):
            return None
        free = "1 more GPU is" if len(gpus) == 2 else f"{len(gpus) - 1} more GPUs are"
        return (
            f"{free} free here: --layout auto trains on all {len(gpus)} if that is faster, and "
            f"--layout spread:{len(gpus)} puts a copy of the backbone on each."
        )

    @property
    def flags(self) -> list[str]:
        return flags_of(self, "layout", "schedule", "devices", "dispatch", "cluster", "gpu_type", "listen")

    @property
    def stages(self) -> StageLayout | None:
        """Stages of the replicas; None for a single undivided replica."""
        if self._sizes == (1,) and not self._tensor:
            return None
        from weft.parallel.stages.load_stages import StageLayout

        schedule = self._read_schedule()
        return StageLayout(
            self._sizes,
            schedule,
            self._shards,
            self._tensor,
            self.devices,
            self.planned,
            self._read_dispatch(),
            bool(self._elsewhere),
            self.num_lessened,
        )

    @property
    def chosen(self) -> ReplicaLayouts:
        if self.layout is None:
            return ReplicaLayouts()
        if self.is_auto:
            raise ConfigError("auto is for weft train, sweep and plan; name a layout, such as stages:2.", where=WHERE)
        return parse_layout(self.layout, where=WHERE, or_auto=self.may_be_auto)

    def hosts(self, model: ResolvedModel | None, jobs: Iterable[JobSpec]) -> ReplicaHosts | None:
        """Hosts of the replicas, each with jobs of its own; None if one engine trains on all replicas. One engine
        trains on a single replica, on replicas that share a job with gradient_sum any_order, and on `planned` replicas,
        each of which may have only some of the jobs."""
        if model is None or len(self._ranks(jobs)) == 1:
            return None
        if not self._elsewhere:
            return self.in_ranks(model, jobs)
        # Divided replicas would need connections among the processes of each rank: one engine trains on all of them.
        number = self.chosen.num_devices
        if len(self.chosen.replicas) < number:
            return None
        others = ReplicaOptions(str(number), cluster=self.cluster, gpu_type=self.gpu_type, listen=self.listen)
        return others.hosts(model.spec)

    @contextlib.contextmanager
    def open_joined(self, backbone: BackboneSpec, console: Console) -> Iterator[JoinedStages | None]:
        """Processes that join from any machine; None without --listen and --cluster."""
        number = self.chosen.num_devices
        if self.cluster is not None:
            from weft.parallel.ray.api import open_stages

            joined: JoinedStages = open_stages(self.cluster, number, backbone, self.gpu_type)
        elif self.listen is not None:
            from weft.parallel.replicas.hosts import join_command
            from weft.parallel.replicas.joined_stages import JoinedStages

            address, key, command = join_command(self.listen)
            joined = JoinedStages(address, key)
            print_line(console, f"ranks     start {number} of them with: {command}")
        else:
            yield None
            return
        try:
            yield joined
        finally:
            joined.end()

    def in_ranks(self, model: ResolvedModel, jobs: Iterable[JobSpec]) -> ReplicaHosts:
        """Hosts of the replicas, also of a single one; replicas that share jobs are in one rank."""
        from weft.parallel.replicas.hosts import layout_hosts
        from weft.parallel.stages.transport import find_gpus

        gpus = find_gpus(model, self.chosen.num_devices, self.devices)
        numbers = self.devices.split(",") if self.devices is not None else [str(k) for k, _ in enumerate(gpus)]
        divided: list[StageLayout | None] = []
        seen: list[str | None] = []
        parts, first = self._ranks(jobs), 0
        for part in parts:
            devices = ",".join(numbers[first : first + part.num_devices]) or None
            planned = self.planned if len(parts) == 1 else None
            stages = LayoutOptions(str(part), devices=devices, planned=planned, dispatch=self.dispatch).stages
            divided.append(stages)
            seen.append(gpus[first] if gpus and stages is None else None)
            first += part.num_devices
        return layout_hosts(divided, seen)

    def _ranks(self, jobs: Iterable[JobSpec]) -> tuple[ReplicaLayouts, ...]:
        is_shared = self.planned is not None or any(job.gradient_sum == "any_order" for job in jobs)
        # A job that moved between unlike degrees, when other processes happened to be ready, would change its bits.
        is_shared |= len({*self.chosen.degrees}) > 1
        return (self.chosen,) if is_shared else self.chosen.apart

    def notes(self, spec: RunSpec, model: ResolvedModel) -> tuple[str, ...]:
        if self.stages is None:
            return ()
        from weft.parallel.stages.load_stages import layout_notes, pair_notes

        stages = self.stages
        return (*layout_notes(spec, model, stages), *pair_notes(spec, model, stages))

    def choose(
        self,
        spec: RunSpec,
        model: ResolvedModel,
        base_dir: Path,
        machine: Machine,
        check_more: Callable[[LayoutOptions], None] | None = None,
        *,
        in_packs: bool = False,
    ) -> tuple[LayoutOptions, ChosenLayout]:
        """The options with a layout instead of auto, and the reasons; `check_more` raises for one to be left out.
        `in_packs`: the jobs are a sweep's, which end at different times."""
        from weft.parallel.auto_layout import choose_for, choose_in_packs

        def check(layout: ReplicaLayouts) -> None:
            options = replace(self, layout=str(layout))
            options.check(spec, (), model)
            if check_more is not None:
                check_more(options)

        found = choose_for(spec, model, base_dir, machine, check, in_stages=self.schedule is not None)
        if in_packs and self.schedule is None:
            found = choose_in_packs(spec, model, base_dir, machine, found, check)
        return LayoutOptions() if found.layout.is_one_device else replace(self, layout=str(found.layout)), found

    def forecaster(
        self,
        spec: RunSpec,
        model: ResolvedModel,
        machine: Machine,
        check: CheckLayout | None = None,
        packs: PackForecaster | None = None,
    ) -> Forecaster | None:
        """Chooses the layout again when jobs come and go; None if it stays. Only on CPUs: it is untested whether closed
        replicas leave a GPU's memory free for others. A given schedule needs stages, which another layout might not
        have. `check`: as in `keeper`; `packs`: a sweep's."""
        from weft.parallel.auto_layout import device_forecaster

        if not machine.is_cpu or self.schedule is not None:
            return None
        try:
            (check or _checked(spec, model))(LayoutOptions("stages:2"))
        except WeftError:
            return None
        return packs or device_forecaster(spec, model, machine)

    def keeper(
        self,
        spec: RunSpec,
        model: ResolvedModel,
        forecast: Forecaster,
        jobs: Sequence[JobSpec],
        check: CheckLayout | None = None,
        *,
        is_controlled: bool = False,
    ) -> LayoutKeeper:
        """Changes the layout of a run as its jobs come and go; `jobs`, `is_controlled`: as in `rank_order`. `check`:
        raises for a layout that not all jobs can have."""
        from weft.parallel.replicas.following_engine import LayoutKeeper
        from weft.parallel.replicas.hosts import rank_order
        from weft.plan.replan import Prediction

        def open_ranks(wanted: Prediction, left: Sequence[JobSpec], capacity: int) -> RankGroup:
            options = LayoutOptions(str(wanted.layout), planned=wanted.replicas, dispatch=self.dispatch)
            (check or _checked(spec, model))(options)
            setup = replace(rank_order(spec, jobs, is_controlled=is_controlled), capacity=capacity)
            return options.in_ranks(model, left).start(setup)

        first = Prediction(self.chosen, 0.0, 0.0, self.planned)
        return LayoutKeeper(first, forecast, open_ranks, planned_for=[job.name for job in jobs])

    def check(self, spec: RunSpec, replica_flags: Sequence[str], model: ResolvedModel | None = None) -> None:
        """ConfigError or ModelError for an impossible layout, before any weight is read. `replica_flags`: flags of
        ReplicaOptions that were given, too; `model`: None if it is not resolved yet."""
        self.check_alone(replica_flags)
        sizes, schedule = self._sizes, self._read_schedule()
        if self.schedule is not None and self.layout is None:
            raise ConfigError("is for stages; give --layout stages:N too.", where="--schedule")
        if schedule is not None and len(sizes) > 1:
            raise ConfigError(f"is for one replica in stages; leave it out with {self.layout}.", where="--schedule")
        if self.stages is None and schedule is not None:
            raise ConfigError(f"is for several stages, and {self.layout} is one; leave it out.", where="--schedule")
        if self.stages is None and self.devices is not None:
            raise ConfigError(f"are for several devices, and {self.layout} is one; leave them out.", where="--devices")
        if self.dispatch is not None:
            self._check_dispatch(spec, sizes)
        if self.stages is not None:
            from weft.model.resolve import resolve
            from weft.parallel.stages.load_stages import check_layout

            check_layout(spec, model or resolve(spec.backbone), self.stages)

    def check_alone(self, replica_flags: Sequence[str]) -> None:
        """ConfigError for an unknown schedule or dispatch, and for options that contradict the layout."""
        self._read_schedule()
        self._read_dispatch()
        if self.gpu_type is not None and self.cluster is None:
            raise ConfigError("is for a cluster; give --cluster, or use --devices.", where="--gpu-type")
        if len(self._elsewhere) > 1:
            raise ConfigError("starts ranks itself; with --listen others start ranks.", where="--cluster")
        for flag in self._elsewhere:
            if self.is_auto or self.chosen.is_one_device:
                raise ConfigError(
                    f"{self.layout} is for this machine; with {flag}, name a layout such as stages:2.", where=WHERE
                )
            if self.devices is not None:
                raise ConfigError(f"are the GPUs here; leave them out with {flag}.", where="--devices")
        if self.is_auto and self.devices is not None:
            raise ConfigError("are for a layout with a name; leave them out with auto.", where="--devices")
        if self.is_auto and self.dispatch is not None:
            raise ConfigError("is for a layout with a name; leave it out with auto.", where="--dispatch")
        if self.layout is not None and replica_flags:
            raise ConfigError(f"determines the replicas; leave {replica_flags[0]} out, or --layout.", where=WHERE)

    def _check_dispatch(self, spec: RunSpec, sizes: Sequence[int]) -> None:
        if len(sizes) == 1 and self.planned is None:
            raise ConfigError("is for several replicas; give --layout spread:N too.", where="--dispatch")
        if not any(job.gradient_sum == "any_order" for job in spec.jobs):
            message = (
                "divides jobs with gradient_sum any_order, and there is none; add defaults.gradient_sum=any_order."
            )
            raise ConfigError(message, where="--dispatch")

    @property
    def _elsewhere(self) -> list[str]:
        return flags_of(self, "listen", "cluster")[::2]

    @property
    def is_auto(self) -> bool:
        return self.layout == AUTO

    @property
    def _sizes(self) -> tuple[int, ...]:
        layout = self.chosen
        if self._tensor and max(layout.shards) > 1:
            message = f"got {self.layout!r}; tensor:N and shards:N exclude each other, and each goes with stages:N."
            raise ConfigError(message, where=WHERE)
        return layout.replica_sizes

    @property
    def _tensor(self) -> tuple[int, ...]:
        """Number of devices that share every layer of each replica; empty if none do."""
        degrees = self.chosen.degrees
        return degrees if max(degrees) > 1 else ()

    @property
    def _shards(self) -> tuple[int, ...]:
        """Number of devices that share each copy of the frozen weights; empty if none is shared."""
        shards = self.chosen.shards
        return shards if max(shards) > 1 else ()

    def _read_dispatch(self) -> DispatchRule:
        if self.dispatch is None:
            return DispatchRule.BALANCED
        if self.dispatch not in RULES:
            raise not_accepted(self.dispatch, RULES, "--dispatch")
        return DispatchRule(self.dispatch)

    def _read_schedule(self) -> Schedule | None:
        """The named schedule; None for auto, which takes the fastest one in the simulator."""
        if self.schedule in (None, AUTO):
            return None
        if self.schedule not in SCHEDULES:
            raise not_accepted(self.schedule, (AUTO, *SCHEDULES), "--schedule")
        return Schedule(self.schedule)


CheckLayout = Callable[[LayoutOptions], None]


def _checked(spec: RunSpec, model: ResolvedModel) -> CheckLayout:
    return lambda options: options.check(spec, (), model)
