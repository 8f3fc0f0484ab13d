"""`draftwire bench --explain`: its table and sentences, on loads whose answer is known."""

from io import StringIO
from typing import Any

from rich.console import Console

from draftwire.cli.bench_explanation import explanation_fields, print_explanation, reason, why_slower
from draftwire.v1.gateway_pb2 import (
    DraftLengthEstimate,
    ExplainSpeculationResponse,
    LoadChoice,
    SpeculationChoice,
)

DRAFTERS = {"drafter": "small", "beside": "suffix"}


def way(drafter: str, length: int, tokens_per_round: float, round_s: float, **fields: Any) -> DraftLengthEstimate:
    """Half of a round with drafts is a step of the verifier, a quarter is drafting."""
    return DraftLengthEstimate(
        drafter=drafter,
        num_draft_tokens=length,
        tokens_per_round=tokens_per_round,
        round_s=round_s,
        verify_s=round_s / 2 if length else round_s,
        draft_s=round_s / 4 if length else 0.0,
        **({"session_share": 1.0, "num_rounds": 7} | fields),
    )


PLAIN = way("", 0, 1.0, 0.020)


def load_of(chosen: DraftLengthEstimate, *drafts: DraftLengthEstimate, sessions: int = 1) -> LoadChoice:
    return LoadChoice(
        min_sessions=sessions,
        max_sessions=2 * sessions - 1,
        chosen=chosen.drafter,
        num_draft_tokens=chosen.num_draft_tokens,
        estimates=[PLAIN, *drafts],
    )


def shown(*loads: LoadChoice, concurrency: int = 1) -> str:
    choice = SpeculationChoice(verifier="v:1", loads=loads, **DRAFTERS)
    return printed(ExplainSpeculationResponse(is_adaptive=True, choices=[choice], least_gain=0.05), concurrency)


def printed(explanation: ExplainSpeculationResponse, concurrency: int = 1) -> str:
    console = Console(file=StringIO(), width=80)
    print_explanation(console, explanation, concurrency)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_each_way_is_one_row_with_parts_of_its_round_and_what_was_measured() -> None:
    four = way("small", 4, 3.0, 0.040, session_share=0.9)
    ahead, own = way("small, ahead", 8, 4.2, 0.060, num_rounds=0), way("suffix", 1, 1.5, 0.032)
    text = shown(load_of(four, four, ahead, own))
    assert "drafts by small or suffix for v:1, one session at a time" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "plain 1.00 - 20.0 20.0 0.0 0.0 50.0 1.00 7" in rows
    assert "* 4 by drafter 3.00 50 % 40.0 20.0 10.0 10.0 67.5 0.90 7" in rows
    assert "8 ahead 4.20 40 % 60.0 30.0 15.0 15.0 70.0 - -" in rows, "nothing was measured of it"
    assert "1 by verifier 1.50 50 % 32.0 16.0 8.0 8.0 46.9 1.00 7" in rows


def test_row_fits_a_terminal_of_eighty_columns() -> None:
    """Whatever models are called: one row is one line."""
    name = "an organisation/a model of a very long name"
    drafts = way(f"{name}, ahead", 8, 8.99, 12.3456)
    choice = SpeculationChoice(verifier="v:1", drafter=name, beside="suffix", loads=[load_of(drafts, drafts)])
    text = printed(ExplainSpeculationResponse(is_adaptive=True, choices=[choice], least_gain=0.05))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "* 8 ahead 8.99 100 % 12345.6 6172.8 3086.4 3086.4 0.7 1.00 7" in rows


def test_one_sentence_says_why_the_chosen_way_is_chosen() -> None:
    def why(chosen: DraftLengthEstimate, *drafts: DraftLengthEstimate) -> str:
        return reason(SpeculationChoice(**DRAFTERS), load_of(chosen, *drafts), 0.05)

    four, one = way("small", 4, 3.0, 0.040), way("suffix", 1, 1.4, 0.040)
    assert why(four, four, one) == (
        "4 tokens by the drafter: 75 tokens/s expected, 50 % more than plain decoding; "
        "another way must be better by 5 %"
    )
    assert why(PLAIN, one) == (
        "plain decoding: 50 tokens/s expected; 1 token by the verifier would make 30 % less, and must be better by 5 %"
    )
    more = way("small, ahead", 8, 4.0, 0.040, num_rounds=0)
    assert why(four, four, more).endswith("; 8 tokens ahead would make 33 % more, which has to be tried first")
    assert why(one, one, four).endswith(
        "30 % less than plain decoding; 4 tokens by the drafter would make 114 % more, and may be chosen next"
    )


def test_load_nearest_to_the_benchmarks_is_shown() -> None:
    two, four = way("small", 2, 2.0, 0.030), way("small", 4, 3.0, 0.040)
    loads = [load_of(two, two), load_of(four, four, sessions=8), LoadChoice(min_sessions=16, max_sessions=31)]
    many = shown(*loads, concurrency=16)
    assert "8 to 15 sessions at a time" in many, "of the load beyond nothing was measured"
    assert "* 4 by drafter" in many
    assert "* 2 by drafter" in shown(*loads, concurrency=1)


def test_server_that_chooses_nothing_says_so() -> None:
    assert "speculation=fixed" in printed(ExplainSpeculationResponse())
    assert "nothing was chosen yet" in printed(ExplainSpeculationResponse(is_adaptive=True))


def test_benchmark_below_one_says_why_and_what_to_try() -> None:
    def why(number: int | None, *loads: LoadChoice, is_adaptive: bool = True, **given: Any) -> str:
        choice = SpeculationChoice(verifier="v:1", loads=loads, **DRAFTERS)
        explanation = ExplainSpeculationResponse(is_adaptive=is_adaptive, choices=[choice])
        options = {"seed": None, "temperature": None, "rejection_sample_method": None, **given}
        return why_slower({"num_speculative_tokens": number, **options}, explanation, 4)

    two = way("small", 2, 2.0, 0.050)
    assert why(8, load_of(PLAIN, two)).endswith("without --num-speculative-tokens the server chooses how many")
    assert why(None, seed=5).endswith("without --seed the server chooses how long")
    for given in ({"temperature": 0.0}, {"rejection_sample_method": "coupled"}):
        assert "still have been finding out" in why(None, seed=5, **given), "lengths are chosen there"
    assert why(None, is_adaptive=False).endswith("start it with speculation=adaptive")
    assert "drafts do not pay here" in why(None, load_of(PLAIN, two))
    assert "still have been finding out" in why(None, load_of(two, two))
    assert "still have been finding out" in why(None)


def test_explanation_is_json_with_the_names_of_the_protos() -> None:
    choice = SpeculationChoice(verifier="v:1", loads=[load_of(PLAIN)], **DRAFTERS)
    (fields,) = explanation_fields(ExplainSpeculationResponse(is_adaptive=True, choices=[choice]))["choices"]
    assert fields["loads"][0]["num_draft_tokens"] == 0, "zeros are there"
    assert fields["loads"][0]["estimates"][0]["round_s"] == 0.02
