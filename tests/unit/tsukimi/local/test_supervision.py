from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.machine import Command, Event
from shared.io.config import CONFIG_EXIT_CODE
from tsukimi.local.supervision import RestartPolicy, Supervisor, describe_exit
from tsukimi.local.supervision_events import (
    Finish,
    LaunchAsked,
    ProcessExited,
    ProcessStarted,
    ReportFailure,
    ReportReady,
    ServiceSpec,
    ShowStage,
    SignalProcess,
    StageSeen,
    StartFailed,
    StartProcess,
    StopAsked,
    Tell,
    Ticked,
)

SPECS = (
    ServiceSpec("nats", ("nats-server",), stop_wave=2, grace_s=5),
    ServiceSpec("decode-0", ("d",), needs=("nats",), stop_wave=1, grace_s=5),
    ServiceSpec("gateway-0", ("g",), needs=("nats",), stop_wave=0, grace_s=5),
)
NAMES = [s.name for s in SPECS]


class Cluster:
    """Plays the processes: what the machine starts gets a pid, what it signals can be made to end."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self.machine = Supervisor(SPECS, policy)
        self.now = 0.0
        self.pids: dict[str, int] = {}
        self.said: list[Command] = []

    def feed(self, event: Event) -> list[Command]:
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        self.said += commands
        return commands

    def start_all(self) -> None:
        self.feed(LaunchAsked())
        for name in NAMES:
            self.live(name)

    def live(self, name: str) -> list[Command]:
        """Started and ready."""
        self.pids[name] = len(self.said) + 100
        self.feed(ProcessStarted(name=name, pid=self.pids[name]))
        return self.feed(StageSeen(name=name, pid=self.pids[name], stage="ready"))

    def wait(self, seconds: float) -> list[Command]:
        self.now += seconds
        return self.feed(Ticked())


def only(commands: list[Command], type_: type) -> list[Command]:
    return [c for c in commands if isinstance(c, type_)]


def test_services_start_once_nats_is_ready() -> None:
    cluster = Cluster()
    assert only(cluster.feed(LaunchAsked()), StartProcess) == [StartProcess(name="nats")]
    assert only(cluster.live("nats"), StartProcess) == [
        StartProcess(name="decode-0"),
        StartProcess(name="gateway-0"),
    ]


def test_ready_is_reported_once_when_all_are() -> None:
    cluster = Cluster()
    cluster.start_all()
    assert len(only(cluster.said, ReportReady)) == 1
    cluster.feed(StageSeen(name="decode-0", pid=cluster.pids["decode-0"], stage="draining"))
    cluster.feed(StageSeen(name="decode-0", pid=cluster.pids["decode-0"], stage="ready"))
    assert len(only(cluster.said, ReportReady)) == 1


def test_a_stage_of_an_earlier_life_is_ignored() -> None:
    cluster = Cluster()
    cluster.feed(LaunchAsked())
    cluster.feed(ProcessStarted(name="nats", pid=7))
    assert cluster.feed(StageSeen(name="nats", pid=6, stage="ready")) == []
    assert cluster.feed(StageSeen(name="stranger", pid=7, stage="ready")) == []


def test_a_dead_service_comes_back_after_a_growing_delay() -> None:
    cluster = Cluster(RestartPolicy(first_delay_s=1.0, max_delay_s=4.0))
    cluster.start_all()
    for delay_s in (1.0, 2.0, 4.0, 4.0):
        cluster.feed(ProcessExited(name="decode-0", code=-9))
        assert only(cluster.wait(delay_s - 0.1), StartProcess) == []
        assert only(cluster.wait(0.2), StartProcess) == [StartProcess(name="decode-0")]
        cluster.live("decode-0")
    cluster.wait(1000.0)
    cluster.feed(ProcessExited(name="decode-0", code=-9))
    assert only(cluster.wait(1.1), StartProcess) == [StartProcess(name="decode-0")]


def test_a_configuration_error_is_not_retried() -> None:
    cluster = Cluster()
    cluster.start_all()
    commands = cluster.feed(ProcessExited(name="decode-0", code=CONFIG_EXIT_CODE))
    (failure,) = only(commands, ReportFailure)
    assert isinstance(failure, ReportFailure)
    assert failure.name == "decode-0"
    assert "configuration" in failure.why
    assert [c.name for c in commands if isinstance(c, SignalProcess)] == ["gateway-0"]
    cluster.feed(ProcessExited(name="gateway-0", code=0))
    assert cluster.feed(ProcessExited(name="nats", code=0))[-1] == Finish(failed=True)
    assert only(cluster.wait(100.0), StartProcess) == []


def test_deaths_in_a_row_before_ready_end_the_cluster() -> None:
    cluster = Cluster(RestartPolicy(give_up_after=3))
    cluster.start_all()
    cluster.feed(ProcessExited(name="decode-0", code=1))
    for pid in (501, 502, 503):
        cluster.wait(10.0)
        cluster.feed(ProcessStarted(name="decode-0", pid=pid))
        cluster.feed(StageSeen(name="decode-0", pid=pid, stage="loading"))
        cluster.feed(ProcessExited(name="decode-0", code=1))
    (failure,) = only(cluster.said, ReportFailure)
    assert isinstance(failure, ReportFailure)
    assert "3 times in a row" in failure.why


def test_a_life_that_was_ready_does_not_count_as_a_failed_start() -> None:
    cluster = Cluster(RestartPolicy(give_up_after=2))
    cluster.start_all()
    for _ in range(20):
        cluster.feed(StageSeen(name="decode-0", pid=cluster.pids["decode-0"], stage="draining"))
        cluster.feed(ProcessExited(name="decode-0", code=-9))
        cluster.wait(10.0)
        cluster.live("decode-0")
    assert only(cluster.said, ReportFailure) == []


def test_a_start_that_fails_is_a_death() -> None:
    cluster = Cluster(RestartPolicy(give_up_after=2))
    cluster.feed(LaunchAsked())
    assert only(cluster.feed(StartFailed(name="nats", error="no such file")), Tell) != []
    cluster.wait(1.0)
    commands = cluster.feed(StartFailed(name="nats", error="no such file"))
    assert [type(c) for c in commands][-2:] == [ReportFailure, Finish]


def test_stopping_goes_wave_by_wave() -> None:
    cluster = Cluster()
    cluster.start_all()
    first = only(cluster.feed(StopAsked()), SignalProcess)
    assert first == [SignalProcess(name="gateway-0", pid=cluster.pids["gateway-0"])]
    second = only(cluster.feed(ProcessExited(name="gateway-0", code=0)), SignalProcess)
    assert second == [SignalProcess(name="decode-0", pid=cluster.pids["decode-0"])]
    third = only(cluster.feed(ProcessExited(name="decode-0", code=0)), SignalProcess)
    assert third == [SignalProcess(name="nats", pid=cluster.pids["nats"])]
    assert only(cluster.feed(ProcessExited(name="nats", code=0)), Finish) == [Finish(failed=False)]


def test_what_does_not_stop_in_its_grace_is_killed() -> None:
    cluster = Cluster()
    cluster.start_all()
    cluster.feed(StopAsked())
    assert only(cluster.wait(4.9), SignalProcess) == []
    killed = only(cluster.wait(0.2), SignalProcess)
    assert killed == [SignalProcess(name="gateway-0", pid=cluster.pids["gateway-0"], kill=True)]


def test_a_second_wish_to_stop_kills_everything_at_once() -> None:
    cluster = Cluster()
    cluster.start_all()
    cluster.feed(StopAsked())
    killed = only(cluster.feed(StopAsked()), SignalProcess)
    assert {c.name for c in killed if isinstance(c, SignalProcess) and c.kill} == set(NAMES)


def test_a_process_started_while_stopping_is_stopped_too() -> None:
    cluster = Cluster()
    cluster.feed(LaunchAsked())
    cluster.feed(StopAsked())
    assert only(cluster.feed(ProcessStarted(name="nats", pid=5)), SignalProcess) == [
        SignalProcess(name="nats", pid=5)
    ]
    assert only(cluster.feed(ProcessExited(name="nats", code=0)), Finish) == [Finish(failed=False)]


def test_stopping_before_anything_started_finishes_at_once() -> None:
    assert only(Cluster().feed(StopAsked()), Finish) == [Finish(failed=False)]


def test_a_stage_is_shown_once() -> None:
    cluster = Cluster()
    cluster.start_all()
    again = StageSeen(name="nats", pid=cluster.pids["nats"], stage="ready")
    assert only(cluster.feed(again), ShowStage) == []


def test_ends_are_told_in_words() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-250) == "was killed by signal 250"


events = st.one_of(
    st.builds(ProcessStarted, name=st.sampled_from(NAMES), pid=st.integers(1, 5)),
    st.builds(StartFailed, name=st.sampled_from(NAMES), error=st.just("no")),
    st.builds(ProcessExited, name=st.sampled_from(NAMES), code=st.sampled_from([0, 1, -9, CONFIG_EXIT_CODE])),
    st.builds(
        StageSeen,
        name=st.sampled_from(NAMES),
        pid=st.integers(1, 5),
        stage=st.sampled_from(["loading", "ready"]),
    ),
    st.builds(StopAsked),
    st.builds(Ticked),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(events, st.floats(0, 10)), max_size=40))
def test_any_story_keeps_the_laws(story: list[tuple[Event, float]]) -> None:
    """No service is started twice over, nothing is started or signalled after the end, and the end comes once."""
    cluster = Cluster()
    cluster.feed(LaunchAsked())
    starting = {"nats"}
    finished = 0
    for event, seconds in story:
        cluster.now += seconds
        if isinstance(event, ProcessStarted | StartFailed):
            starting.discard(event.name)
        commands = cluster.feed(event)
        if isinstance(event, ProcessExited):
            starting.discard(event.name)
        for command in commands:
            assert finished == 0
            if isinstance(command, StartProcess):
                assert command.name not in starting
                starting.add(command.name)
            finished += isinstance(command, Finish)
