"""The launcher with stand-ins for the services: real processes, a real nats-server, real signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.launcher_process import STAND_INS, LauncherProcess, can_connect, launched, nothing_left
from tests.support.processes.spawn import wait_until

SMALL = ["--model", "toy", "--kv-memory", "1M", "--pool-memory", "1M", *STAND_INS]


def nats_port(cluster: LauncherProcess) -> int:
    return int(cluster.state().nats_url.rsplit(":", 1)[1])


def shared_memory_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_a_cluster_starts_shows_itself_and_leaves_nothing(tmp_path: Path) -> None:
    before = shared_memory_files()
    with launched(tmp_path / "run", *SMALL, "--prefill", "2") as cluster:
        said = cluster.said()
        assert "prefill-1    loading (pretending)" in said
        assert f"curl -N http://127.0.0.1:{cluster.port}/v1/chat/completions" in said
        nodes = {n["node"]: n for n in cluster.status()["nodes"]}
        assert list(nodes) == ["gateway-0", "conductor-0", "prefill-0", "prefill-1", "decode-0", "cache-0"]
        assert nodes["prefill-0"]["hit_rate"] == 0.25
        assert nodes["decode-0"]["pid"] == cluster.pid("decode-0")
        assert (cluster.run_dir.logs / "decode-0.log").exists()
        processes, port = cluster.processes(), nats_port(cluster)
        assert len(processes) == 7
        done = cluster.run("down")
        assert (done.returncode, cluster.wait_end()) == (0, 0)
        assert nothing_left(processes, port, cluster.port)
        assert cluster.run_dir.read() is None
        assert "was killed" not in cluster.said()
        assert "No cluster runs" in cluster.run("down").stdout
    assert shared_memory_files() <= before


def test_a_second_cluster_is_refused_on_the_same_folder_and_on_the_same_port(tmp_path: Path) -> None:
    with launched(tmp_path / "run", *SMALL) as cluster:
        again = cluster.run("up", *SMALL, "--port", "1")
        assert again.returncode == 1
        assert "a cluster already runs in" in again.stderr
        other = LauncherProcess(tmp_path / "other", *SMALL)
        other.arguments += ["--port", str(cluster.port)]
        other.start()
        assert other.wait_end() == 1
        assert f"port {cluster.port} is in use" in other.said()
        assert "Traceback" not in other.said()


def test_dead_services_and_a_dead_nats_server_come_back(tmp_path: Path) -> None:
    with launched(tmp_path / "run", *SMALL) as cluster:
        port = nats_port(cluster)
        for name in ("decode-0", "prefill-0", "cache-0", "conductor-0", "gateway-0", "nats"):
            cluster.kill(name)
        assert nats_port(cluster) == port
        assert "decode-0     was killed by SIGKILL; restarting in 0.2 s" in cluster.said()
        wait_until(lambda: len(cluster.status()["nodes"]) == 5, 10.0, "all are on the bus again")


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with launched(tmp_path / "run", *SMALL) as cluster:
        processes, port = cluster.processes(), nats_port(cluster)
        assert cluster.process is not None
        cluster.process.kill()
        cluster.process.wait()
        wait_until(lambda: nothing_left(processes, port, cluster.port), 10.0, "everything is gone")
        assert "is a cluster up" in cluster.run("status").stderr
        cluster.output.unlink()
        cluster.start()  # over the crashed one's state
        cluster.wait_ready()
        assert cluster.run("down").returncode == 0


def test_a_launcher_killed_while_starting_leaves_nothing(tmp_path: Path) -> None:
    cluster = LauncherProcess(tmp_path / "run", *SMALL)
    try:
        cluster.start()
        wait_until(lambda: cluster.said().count("starting") == 6, 20.0, "all are being started")
        processes = cluster.processes()
        assert cluster.process is not None
        cluster.process.kill()
        cluster.process.wait()
        wait_until(lambda: nothing_left(processes, cluster.port), 10.0, "everything is gone")
        assert "gone already; cleaned up" in cluster.run("down").stdout
    finally:
        cluster.end()


def test_a_configuration_error_ends_the_cluster_and_says_why(tmp_path: Path) -> None:
    cluster = LauncherProcess(tmp_path / "run", *SMALL, "--set", "decode.behaviour=config_error")
    try:
        cluster.start()
        assert cluster.wait_end() == 1
        assert "decode-0 failed" in cluster.said()
        assert "kv_bytes: a stand-in whose configuration cannot work" in cluster.said()
        assert "restarting" not in cluster.said()
        state = cluster.state()
        assert (state.phase, state.processes) == ("failed", ())
        assert "decode-0" in state.error
        assert not can_connect(nats_port(cluster))
    finally:
        cluster.end()


def test_a_service_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    cluster = LauncherProcess(tmp_path / "run", *SMALL, "--set", "prefill.behaviour=crash")
    try:
        cluster.start()
        assert cluster.wait_end() == 1
        assert cluster.said().count("prefill-0    exited with code 3; restarting") == 4
        assert "5 times in a row without becoming ready" in cluster.said()
        assert "| this stand-in crashes on purpose" in cluster.said()
    finally:
        cluster.end()


def test_what_ignores_the_wish_to_stop_is_killed(tmp_path: Path) -> None:
    stubborn = ["--set", "decode.behaviour=stubborn", "--set", "decode.grace_s=0"]
    with launched(tmp_path / "run", *SMALL, *stubborn) as cluster:
        processes = cluster.processes()
        assert cluster.run("down").returncode == 0
        assert "decode-0     did not stop in 5 s; killed" in cluster.said()
        assert nothing_left(processes)


def test_down_kill_is_immediate(tmp_path: Path) -> None:
    with launched(tmp_path / "run", *SMALL, "--set", "decode.behaviour=stubborn") as cluster:
        processes = cluster.processes()
        assert cluster.run("down", "--kill").returncode == 0
        assert nothing_left(processes)


def test_a_detached_cluster_outlives_its_command(tmp_path: Path) -> None:
    cluster = LauncherProcess(tmp_path / "run", *SMALL, "--detach")
    try:
        cluster.start()
        assert cluster.wait_end() == 0
        assert "Ready: " in cluster.said()
        assert cluster.state().phase == "ready"
        processes = [*cluster.processes(), cluster.state().launcher]
        assert "already runs" in cluster.run("up", *SMALL, "--detach").stderr
        assert cluster.run("down").returncode == 0
        assert nothing_left(processes)
    finally:
        cluster.run("down", "--kill")


def test_logs_are_printed_by_name(tmp_path: Path) -> None:
    with launched(tmp_path / "run", *SMALL) as cluster:
        assert "Listening for client connections" in cluster.run("logs", "nats").stdout
        assert "there are cache-0, conductor-0" in cluster.run("logs", "router-0").stderr


def test_a_mistake_in_the_options_is_one_sentence(tmp_path: Path) -> None:
    cluster = LauncherProcess(tmp_path / "run", *SMALL)
    for mistake in (["--kv-memory", "much"], ["--set", "decode"], ["--use", "x=y"], ["--kv-memory", "9999G"]):
        done = cluster.run("up", *SMALL, *mistake)
        assert done.returncode != 0
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert done.stderr.startswith("tsukimi: ")


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGHUP])
def test_other_wishes_to_stop_are_heard(tmp_path: Path, signal_: signal.Signals) -> None:
    with launched(tmp_path / "run", *SMALL) as cluster:
        processes = cluster.processes()
        assert cluster.process is not None
        cluster.process.send_signal(signal_)
        assert cluster.wait_end() == 0
        assert nothing_left(processes)
