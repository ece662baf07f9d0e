"""From an evaluation (`python -m mhc gsm8k record`, or a live one) to the tables that notebook 04 shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mhc.bench.records import caption, find
from mhc.gsm8k import stats
from mhc.gsm8k.rows import Record, questions, read
from mhc.gsm8k.stats import Acceptance, Discordance, Interval


class Arms:
    """Question rows of several arms, with the lines that sum them up.

    Args:
        records: `question`, `arm`, `equality`, .. records.
        k: draft length of the main arms.
    """

    def __init__(self, records: Sequence[Record], k: int) -> None:
        self.records = list(records)
        self.k = k

    def of(self, kind: str, **where: object) -> list[Record]:
        """The lines of a kind whose fields equal `where`, in file order."""
        return [r for r in self.records if r["record"] == kind and all(r.get(key) == v for key, v in where.items())]

    def rows(self, arm: str, k: int | None = None, temperature: float = 1.0) -> Rows:
        """An arm's question rows, ordered by id; `k` is the run's unless given."""
        return Rows(questions(self.records, arm=arm, k=self.k if k is None else k, temperature=temperature))

    @property
    def arms(self) -> list[str]:
        """The arms measured at full length and temperature 1 without truncation, the baseline first."""
        lines = self.of("arm", k=self.k, temperature=1.0, threshold=0.0)
        return sorted((line["arm"] for line in lines), key=lambda arm: (arm != "repeat", arm))


class Evaluation(Arms):
    """A recorded evaluation of the miniature pair.

    Args:
        path: the JSONL file.

    Raises:
        ValueError: the file is no such record.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        records = read(self.path)
        self.run = records[0]
        if self.run.get("what") != "gsm8k" or self.run.get("engine") != "mini":
            raise ValueError(f"{path} is no record of `python -m mhc gsm8k record`: {self.run.get('what')!r}")
        super().__init__(records, self.run["k"])

    @classmethod
    def newest(cls, folder: str | Path) -> Evaluation:
        """The newest record in `folder`.

        Raises:
            FileNotFoundError: there is none.
        """
        paths = [path for path in find(folder, "gsm8k") if read(path)[0].get("engine") == "mini"]
        if not paths:
            raise FileNotFoundError(
                f"No GPU run of GSM8K has been recorded in {folder}/ yet: `python -m mhc train target`, "
                "`python -m mhc train draft` and then `python -m mhc gsm8k record` make one"
            )
        return cls(paths[-1])

    @property
    def caption(self) -> str:
        """Where and when, and whether it was interrupted."""
        return caption(self.run) + ("" if self.of("end") else " (interrupted)")


class Rows:
    """One arm's questions as arrays; `accepted` is by question and position [N, k]."""

    def __init__(self, rows: Sequence[Record]) -> None:
        self.ids = np.array([row["id"] for row in rows])
        self.drafts = np.array([row["drafts"] for row in rows])
        self.accepted = np.array([row["accepted_per_position"] for row in rows]).reshape(len(rows), -1)
        self.tokens = np.array([row["tokens"] for row in rows])
        self.correct = np.array([row["correct"] for row in rows])
        self.invalid = np.array([row["invalid"] for row in rows])
        self.text = np.array([row["text_sha256"] for row in rows])

    def uncounted(self) -> NDArray[np.int64]:
        """[N] tokens that the counters promise and the answer lacks: 0, or 1 if the last round's own token was cut.

        An answer is the prefill's token, then accepted tokens and one more a round; its end or its limit may come
        before the last of them.
        """
        return 1 + self.drafts + self.accepted.sum(1) - self.tokens

    def acceptance(self) -> Acceptance:
        """Totals; the identity of length and rates is asserted on the way."""
        return Acceptance.of(self.drafts, self.accepted)

    def length(self) -> Interval:
        """Mean acceptance length, questions resampled."""
        return stats.mean_length_interval(self.drafts, self.accepted.sum(1))

    def subset_lengths(self, size: int, draws: int = 2_000, seed: int = 0) -> Interval:
        """Where the mean length of `size` questions falls: median, and the middle 99 % of random subsets."""
        rng = np.random.default_rng(seed)
        index = np.array([rng.choice(len(self.ids), min(size, len(self.ids)), replace=False) for _ in range(draws)])
        lengths = 1 + self.accepted.sum(1)[index].sum(1) / self.drafts[index].sum(1)
        return Interval(*(float(value) for value in np.quantile(lengths, [0.5, 0.005, 0.995])))


def headline(evaluation: Arms) -> pd.DataFrame:
    """Accuracy and acceptance of each arm at temperature 1 and greedily, with 95 % intervals."""
    table = []
    for temperature in (1.0, 0.0):
        for arm in evaluation.arms:
            rows = evaluation.rows(arm, temperature=temperature)
            accuracy = stats.wilson(int(rows.correct.sum()), len(rows.ids))
            length = rows.length()
            table.append(
                {
                    "arm": arm,
                    "temperature": temperature,
                    "accuracy, %": 100 * accuracy.value,
                    "95 %": f"{100 * accuracy.low:.1f} to {100 * accuracy.high:.1f}",
                    "invalid, %": 100 * rows.invalid.mean(),
                    "mean length": length.value,
                    "95 % ": f"{length.low:.3f} to {length.high:.3f}",
                    "drafts": int(rows.drafts.sum()),
                    "tokens": int(rows.tokens.sum()),
                }
            )
    return pd.DataFrame(table).set_index(["temperature", "arm"])


def by_position(evaluation: Arms, arm: str) -> pd.DataFrame:
    """Acceptance by position at temperature 1: unconditional rate with its interval, and conditional."""
    rows = evaluation.rows(arm)
    acceptance = rows.acceptance()
    intervals = [stats.ratio_interval(rows.accepted[:, i], rows.drafts) for i in range(acceptance.k)]
    return pd.DataFrame(
        {
            "position": range(1, acceptance.k + 1),
            "rate": acceptance.rate_per_position,
            "low": [interval.low for interval in intervals],
            "high": [interval.high for interval in intervals],
            "conditional": acceptance.conditional_per_position,
        }
    ).set_index("position")


class Pairing(NamedTuple):
    """Two arms on the same questions."""

    first: str
    second: str
    temperature: float
    differing_texts: int
    length: Interval  # second minus first
    correct: Discordance


def paired(evaluation: Arms, first: str, second: str, temperature: float) -> Pairing:
    """Texts that differ, paired bootstrap of the mean length, exact McNemar of the verdicts."""
    a, b = (evaluation.rows(arm, temperature=temperature) for arm in (first, second))
    length = stats.paired_length_difference((a.drafts, a.accepted.sum(1)), (b.drafts, b.accepted.sum(1)))
    correct = stats.mcnemar_exact(a.correct.tolist(), b.correct.tolist())
    return Pairing(first, second, temperature, int((a.text != b.text).sum()), length, correct)


def pairing_table(pairs: Sequence[Pairing]) -> pd.DataFrame:
    """Pairings as rows."""
    table = [
        {
            f"arm against {pair.first}": pair.second,
            "temperature": pair.temperature,
            "texts that differ": pair.differing_texts,
            "difference of mean length": round(pair.length.value, 4),
            "95 %": f"{pair.length.low:+.4f} to {pair.length.high:+.4f}",
            f"right in {pair.first} alone": pair.correct.only_first,
            "right in the other alone": pair.correct.only_second,
            "McNemar p": round(pair.correct.p_value, 3),
        }
        for pair in pairs
    ]
    return pd.DataFrame(table).set_index([f"arm against {pairs[0].first}", "temperature"])


def answer(evaluation: Evaluation, pairs: Sequence[Pairing]) -> str:
    """The record's answer to the notebook's question, as Markdown: lengths at temperature 1, and greedy texts."""
    baseline = evaluation.rows("repeat")
    lengths = ", ".join(
        f"{pair.second} {pair.length.value:+.4f} ({pair.length.low:+.4f} to {pair.length.high:+.4f})"
        for pair in pairs
        if pair.temperature == 1
    )
    texts = equality(evaluation)
    return (
        f"**What the record answers.** On {len(baseline.ids):,} questions at temperature 1 the draft's mean acceptance "
        f"length with `repeat` is {baseline.length().value:.3f}; the other arms differ from it by {lengths}, in tokens "
        f"with paired 95 % intervals. {texts.differing.sum():,} of {texts.questions.sum():,} greedy texts differ from "
        "plain decoding's."
    )


def differences(evaluation: Evaluation) -> pd.DataFrame:
    """Greedy drafts from the same contexts that differ from repeat's, an arm a row."""
    table = pd.DataFrame(evaluation.of("difference")).set_index("arm")
    share = 100 * table.differing / table.blocks
    table = table.assign(**{"differing, %": share, "largest difference of logits": table.logit_error})
    columns = ["blocks", "differing", "differing, %", "first_position", "largest difference of logits"]
    return table[columns].rename(columns={"first_position": "first differing at 1 to k"})


def equality(evaluation: Arms) -> pd.DataFrame:
    """Greedy texts against plain decoding: questions and how many differ, an arm a row."""
    table = pd.DataFrame(evaluation.of("equality"))
    return table.assign(differing=table.differing_ids.str.len())[["arm", "questions", "differing"]].set_index("arm")


def training_curves(folder: str | Path) -> dict[str, pd.DataFrame]:
    """The newest loss curves beside the weights, a row a record: target, its sharpening, draft; what there is."""
    curves: dict[str, pd.DataFrame] = {}
    for trained in ("target", "draft"):
        for path in find(folder, f"train-{trained}")[-1:]:
            records = pd.DataFrame(record for record in read(path) if record["record"] == "training")
            curves |= {str(name): part.dropna(axis=1, how="all") for name, part in records.groupby("model", sort=False)}
    return curves


def by_draft_length(evaluation: Evaluation, arm: str = "broadcast") -> pd.DataFrame:
    """Mean length at each k, and what the full-length run predicts for it: `1 + sum of its first k rates`."""
    rates = evaluation.rows(arm).acceptance().rate_per_position
    table = []
    for k in range(1, evaluation.k + 1):
        length = evaluation.rows(arm, k).length()
        table.append({"k": k, "length": length.value, "low": length.low, "high": length.high})
    return pd.DataFrame(table).assign(predicted=1 + np.cumsum(rates)).set_index("k")


def by_threshold(evaluation: Evaluation) -> pd.DataFrame:
    """Confidence truncation: tokens verified and accepted, as shares and a round."""
    lines = pd.DataFrame(evaluation.of("arm", k=evaluation.k, temperature=1.0))
    lines = lines[lines.arm.str.startswith("broadcast")].sort_values("threshold").set_index("threshold")
    return pd.DataFrame(
        {
            "verified tokens a round": lines.drafted / lines.drafts,
            "mean length": lines.mean_length,
            "accepted of verified, %": 100 * lines.accepted / lines.drafted.replace(0, np.nan),
        }
    )


def speed(evaluation: Evaluation) -> pd.DataFrame:
    """Tokens a second of plain and speculative decoding, median over rounds, and the speed-up over plain."""
    table = pd.DataFrame(evaluation.of("throughput"))
    rates = [sorted(tokens / wall for wall in walls) for tokens, walls in zip(table.tokens, table.wall_s, strict=True)]
    table = table.assign(
        median=[float(np.median(rate)) for rate in rates],
        low=[rate[0] for rate in rates],
        high=[rate[-1] for rate in rates],
    )
    table = table.pivot(index=["launch", "requests"], columns="arm", values=["median", "low", "high"])
    for arm in ("repeat", "broadcast"):
        table[("speed-up", arm)] = table[("median", arm)] / table[("median", "plain")]
    return table
