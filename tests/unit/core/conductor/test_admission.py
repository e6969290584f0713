from __future__ import annotations

from shared.core.conductor.admission import Admission, Outlook, Refusal
from shared.core.conductor.objectives import Objectives


def outlook(
    ttft_s: float = 1.0,
    tbt_s: float = 0.05,
    queue_s: float = 0.5,
    samples: int = 100,
    idle: bool = False,
    exact: bool = False,
    drained_s: float = 7.0,
) -> Outlook:
    return Outlook(
        ttft_s=ttft_s,
        tbt_s=tbt_s,
        queue_s=queue_s,
        samples=samples,
        idle=idle,
        exact=exact,
        drained_s=drained_s,
    )


def test_without_objectives_everything_is_taken() -> None:
    assert Admission(Objectives()).judge(outlook(ttft_s=1e9, tbt_s=1e9)) is None


def test_at_an_objective_is_taken_and_over_it_refused_with_the_time_to_wait() -> None:
    admission = Admission(Objectives(ttft_s=2.0, tbt_s=0.1))
    assert admission.judge(outlook(ttft_s=2.0, tbt_s=0.09)) is None
    refusal = admission.judge(outlook(ttft_s=5.0, queue_s=4.0))
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after_s == 3.0
    assert "TTFT" in refusal.reason
    refusal = admission.judge(outlook(tbt_s=0.091))  # the rest is left to what the sequences grow by
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after_s == 7.0
    assert "TBT" in refusal.reason
    assert admission.refused == {"ttft": 1, "tbt": 1}


def test_a_wait_over_the_limit_is_refused_however_short_the_prompt_itself_is() -> None:
    admission = Admission(Objectives(max_wait_s=30.0))
    assert admission.judge(outlook(ttft_s=500.0, queue_s=30.0)) is None
    refusal = admission.judge(outlook(ttft_s=36.0, queue_s=35.0))
    assert isinstance(refusal, Refusal)
    assert (refusal.cause, refusal.retry_after_s) == ("wait", 5.0)


def test_a_failover_is_never_refused() -> None:
    assert Admission(Objectives(ttft_s=2.0)).judge(outlook(ttft_s=99.0), retry=True) is None


def test_nothing_is_refused_on_a_guess_while_nodes_are_idle() -> None:
    admission = Admission(Objectives(ttft_s=2.0))
    for _ in range(100):
        assert admission.judge(outlook(ttft_s=20.0, samples=0, idle=True)) is None
    assert admission.let_through == 100
    assert admission.judge(outlook(ttft_s=20.0, samples=0, idle=False)) is not None


def test_even_a_measured_model_refuses_only_a_share_while_nodes_are_idle() -> None:
    admission = Admission(Objectives(ttft_s=2.0, idle_refusals=0.5))
    verdicts = [admission.judge(outlook(ttft_s=20.0, queue_s=0.0, idle=True)) is None for _ in range(100)]
    assert verdicts[0]
    assert 45 <= sum(verdicts) <= 60


def test_under_load_the_model_is_trusted() -> None:
    admission = Admission(Objectives(ttft_s=2.0))
    assert all(admission.judge(outlook(ttft_s=20.0)) for _ in range(100))


def test_a_given_model_refuses_all_that_is_over_even_while_nodes_are_idle() -> None:
    admission = Admission(Objectives(ttft_s=2.0))
    assert all(admission.judge(outlook(ttft_s=20.0, samples=0, idle=True, exact=True)) for _ in range(100))
    assert admission.judge(outlook(ttft_s=2.0, samples=0, idle=True, exact=True)) is None
    assert admission.let_through == 0


def test_what_a_given_model_refuses_leaves_the_share_of_fitted_ones_alone() -> None:
    plain, mixed = (Admission(Objectives(ttft_s=2.0)) for _ in range(2))
    fitted = outlook(ttft_s=20.0, idle=True)
    for _ in range(50):
        mixed.judge(outlook(ttft_s=20.0, samples=0, idle=True, exact=True))
        assert (mixed.judge(fitted) is None) == (plain.judge(fitted) is None)
