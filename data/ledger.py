"""Ledger of what was read: for each file how many rows and texts it gave, and why other rows are no
texts. So nothing is lost without a word: the manifest keeps it, and a file that is not what it
seems is named.

Which rows are texts is decided in data/source.py.
"""

from collections import Counter
from dataclasses import dataclass, field

# Reasons that are usual in a sound file. A file with another one, or without any text, is suspect.
USUAL = ("empty", "without")


@dataclass(frozen=True)
class Skipped:
    """Row that is no text."""

    reason: str
    """Key under which the ledger counts such rows."""


@dataclass
class FileCounts:
    """Counts of what a file, or a dataset of the hub, has given so far."""

    size: int
    """Bytes of the file; 0 for a dataset."""
    rows: int = 0
    texts: int = 0
    bytes: int = 0
    """Bytes of the texts in UTF-8."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Rows that are no texts, by reason."""

    def add(self, rows: list[str | Skipped]) -> None:
        """Count rows."""
        self.rows += len(rows)
        for row in rows:
            if isinstance(row, Skipped):
                self.skipped[row.reason] = self.skipped.get(row.reason, 0) + 1
            else:
                self.texts += 1
                self.bytes += len(row.encode())

    @property
    def is_suspect(self) -> bool:
        """True for a file that is not what it seems: rows without any text, or damaged rows."""
        lacks_text = self.rows > 0 and self.texts == 0  # an empty file has no row
        return lacks_text or any(not reason.startswith(USUAL) for reason in self.skipped)

    def describe(self, name: str) -> str:
        """Return what the file of a name has given, as a sentence."""
        reasons = join_reasons(self.skipped)
        return f"{name} gave {self.texts:,} texts in {self.rows:,} rows; skipped: {reasons}"


def sum_skipped(entries: dict[str, dict]) -> dict[str, int]:
    """Return the skipped rows by reason of all files of a manifest's ledger."""
    total: Counter[str] = Counter()
    for entry in entries.values():
        total.update(entry["skipped"])
    return dict(total)


def join_reasons(skipped: dict[str, int]) -> str:
    """Return how many rows were skipped, for each reason."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items()) or "none"
