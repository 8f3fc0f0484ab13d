"""`draftwire bench --explain`: its sentences and break-even points, on loads whose answer is known."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from draftwire.cli.bench_explanation import (
    break_even_acceptance,
    break_even_token_s,
    explanation_fields,
    print_explanation,
    reasons,
    why_slower,
)
from draftwire.v1.gateway_pb2 import (
    DraftLengthEstimate,
    ExplainSpeculationResponse,
    LoadChoice,
    SpeculationChoice,
)

PLAIN_S, FIXED_S, TOKEN_S = 0.010, 0.012, 0.002


def load_of(acceptance: float, chosen: int, token_s: float = TOKEN_S, sessions: int = 1) -> LoadChoice:
    """A plain round of 10 ms; a draft of k tokens takes 12 ms and 2 ms for each."""
    lengths = [
        DraftLengthEstimate(
            num_draft_tokens=length,
            tokens_per_round=sum(acceptance**place for place in range(length + 1)),
            round_s=FIXED_S + length * token_s if length else PLAIN_S,
            num_windows=length % 2,
        )
        for length in range(3)
    ]
    return LoadChoice(
        min_sessions=sessions,
        max_sessions=2 * sessions - 1,
        num_draft_tokens=chosen,
        estimates=lengths,
        draft_token_s=token_s,
        row_s=0.0005,
    )


def choice_of(*loads: LoadChoice, acceptance: float = 0.5) -> SpeculationChoice:
    survival = [acceptance, acceptance**2]
    return SpeculationChoice(verifier="v:1", drafter="small", survival=survival, num_drafts=70, loads=loads)


def test_drafting_breaks_even_where_the_best_length_is_as_fast_as_plain() -> None:
    """One token: 1 + a = 1.4. Two: 1 + a + a^2 = 1.6, which needs more."""
    acceptance = break_even_acceptance(load_of(0.1, 0))
    assert acceptance == pytest.approx(0.4, abs=1e-6)
    two = break_even_acceptance(load_of(0.1, 0, token_s=0.0005))
    assert two is not None
    assert 1.0 + two + two**2 == pytest.approx(1.3), "one token alone would need 1 + a = 1.25"


def test_prompts_and_waits_count_in_rates_and_in_no_round() -> None:
    """Of plain decoding four fifths of a session's time are rounds, and of drafts half."""
    load = load_of(0.5, 0)
    for estimate in load.estimates:
        estimate.session_share = 0.5 if estimate.num_draft_tokens else 0.8
    text = shown(ExplainSpeculationResponse(is_adaptive=True, choices=[choice_of(load)]), 1)
    (plain, one) = (row for line in text.splitlines() if (row := line.replace("* ", "").split())[:1] in (["0"], ["1"]))
    assert plain[1:4] == ["1.00", "10.00", "80.0"]
    assert one[1:4] == ["1.50", "14.00", "53.6"]
    assert "a plain round 10.00 ms" in text
    assert break_even_acceptance(load) == pytest.approx(0.845362, abs=1e-6), "(1 + a + a^2) / 32 ms = 1 / 12.5 ms"
    allowed = load_of(1.0, 0)
    for estimate in allowed.estimates:
        estimate.session_share = load.estimates[estimate.num_draft_tokens].session_share
    assert break_even_token_s(allowed, 1) == pytest.approx(2.0 * 0.0125 * 0.5 - 0.012)


def test_nothing_breaks_even_where_no_acceptance_or_time_is_enough() -> None:
    assert break_even_acceptance(load_of(0.1, 0, token_s=1.0)) is None
    assert break_even_token_s(load_of(0.1, 0), 1) is None, "12 ms without the draft, for 1.1 tokens of 10 ms"
    assert break_even_token_s(load_of(0.5, 0), 1) == pytest.approx(0.015 - 0.012)


def test_what_would_change_the_choice_is_said() -> None:
    lossy = list(reasons(choice_of(), load_of(0.3, 0)))
    assert lossy[0].startswith("prices: a plain round 10.00 ms, a draft token 2.00 ms, a row of the verifier 0.50 ms")
    assert lossy[1].startswith("drafting does not pay: 1 tokens make 0.93 times")
    assert lossy[2] == "it would if 40% of the tokens were accepted, each after the one before; now 50%"
    assert lossy[3] == "or if a draft token took 1.00 ms; now 2.00 ms"
    gaining = list(reasons(choice_of(), load_of(0.75, 2)))
    assert gaining[1].startswith("drafting pays: 2 tokens make 1.45 times")
    assert gaining[2].startswith("it would not if less than 40%")
    free = load_of(0.8, 2)
    for estimate in free.estimates:
        estimate.round_s = PLAIN_S
    assert len(list(reasons(choice_of(), free))) == 2, "it pays whatever is accepted"


def shown(explanation: ExplainSpeculationResponse, concurrency: int) -> str:
    console = Console(file=StringIO(), width=200)
    print_explanation(console, explanation, concurrency)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_load_nearest_to_the_benchmarks_is_shown_with_its_chosen_length() -> None:
    loads = [load_of(0.3, 0), load_of(0.8, 2, sessions=8), LoadChoice(min_sessions=16, max_sessions=31)]
    explanation = ExplainSpeculationResponse(is_adaptive=True, choices=[choice_of(*loads)])
    many = shown(explanation, 16)
    assert "small for v:1, 8 to 15 sessions at a time" in many, "of the load beyond nothing was measured"
    assert [line.split()[:2] for line in many.splitlines() if "*" in line] == [["*", "2"]]
    one = shown(explanation, 1)
    assert "one session at a time" in one
    assert "1 windows" in one
    assert "the others" in one


def test_table_says_who_drafts_where_two_could() -> None:
    drafter, verifier = choice_of(load_of(0.3, 2)), choice_of(load_of(0.8, 2))
    drafter.beside, verifier.beside, verifier.drafter, verifier.is_local = "suffix", "small", "suffix", True
    for choice in (drafter, verifier):
        choice.loads[0].chosen = "suffix"
    text = shown(ExplainSpeculationResponse(is_adaptive=True, choices=[drafter, verifier]), 1)
    other, chosen = text.split("lengths of drafts by ")[1:]
    assert other.startswith("small for v:1, beside suffix, one session")
    assert chosen.startswith("suffix at v:1, beside small, one session")
    assert "*" not in other
    assert "suffix drafts: it is faster than 2 tokens of small, 0.87 times plain decoding" in other
    assert "* 2" in chosen
    assert "drafting pays: 2 tokens make" in chosen


def test_trees_are_shown_as_far_as_they_were_measured() -> None:
    """In rows of their own, whose length is no place in a list."""
    plain = DraftLengthEstimate(tokens_per_round=1.0, round_s=0.01, session_share=1.0, num_windows=3)
    trees = [
        DraftLengthEstimate(
            num_draft_tokens=length,
            num_draft_nodes=nodes,
            tokens_per_round=tokens,
            round_s=0.02,
            session_share=1.0,
            num_windows=2,
        )
        for length, nodes, tokens in ((4, 8, 3.0), (8, 32, 5.0))
    ]

    def told(chosen: str, *estimates: DraftLengthEstimate) -> str:
        best = {"num_draft_tokens": 8, "num_draft_nodes": 32} if chosen == "small, trees" else {}
        load = LoadChoice(min_sessions=1, max_sessions=1, estimates=[plain, *estimates], chosen=chosen, **best)
        choice = SpeculationChoice(verifier="v:1", drafter="small, trees", num_drafts=9, loads=[load])
        return shown(ExplainSpeculationResponse(is_adaptive=True, choices=[choice]), 1)

    assert told("") == "\n", "nothing is said of trees that were not tried"
    pays = told("small, trees", *trees)
    assert "* 32 in 8" in pays
    assert " 8 in 4 " in pays
    assert pays.count("*") == 1
    assert "drafting pays: 32 in 8 tokens make 2.50 times the tokens/s of plain decoding" in pays
    assert "drafting does not pay: 8 in 4 tokens make 1.50 times" in told("", trees[0])
    assert "small drafts: it is faster than 8 in 4 tokens of small, trees, 1.50 times" in told("small", trees[0])


def test_server_that_chooses_nothing_says_so() -> None:
    assert "speculation=fixed" in shown(ExplainSpeculationResponse(), 4)
    assert "nothing was chosen yet" in shown(ExplainSpeculationResponse(is_adaptive=True), 4)


def test_benchmark_below_one_says_why_and_what_to_try() -> None:
    def why(number: int | None, *loads: LoadChoice, is_adaptive: bool = True, **given: Any) -> str:
        explanation = ExplainSpeculationResponse(is_adaptive=is_adaptive, choices=[choice_of(*loads)])
        options = {"seed": None, "temperature": None, "rejection_sample_method": None, **given}
        return why_slower({"num_speculative_tokens": number, **options}, explanation, 4)

    assert why(8, load_of(0.3, 0)).endswith("without --num-speculative-tokens the server chooses how many")
    assert why(None, seed=5).endswith("without --seed the server chooses how long")
    for given in ({"temperature": 0.0}, {"rejection_sample_method": "coupled"}):
        assert "still have been finding out" in why(None, seed=5, **given), "lengths are chosen there"
    assert why(None, is_adaptive=False).endswith("start it with speculation=adaptive")
    assert "drafts do not pay here" in why(None, load_of(0.3, 0))
    assert "still have been finding out" in why(None, load_of(0.8, 2))
    assert "still have been finding out" in why(None)


def test_explanation_is_json_with_the_names_of_the_protos() -> None:
    explanation = ExplainSpeculationResponse(is_adaptive=True, choices=[choice_of(load_of(0.5, 0))])
    (choice,) = explanation_fields(explanation)["choices"]
    assert choice["loads"][0]["num_draft_tokens"] == 0, "zeros are there"
    assert choice["survival"] == [0.5, 0.25]
