"""What an evaluation says, in three sentences."""

from collections import Counter
from collections.abc import Sequence

from bier.evaluate.ensemble import EnsembleResult
from bier.files import printable

EASY = 99.0  # percent: where the untrained backbone has more, these classes say little about a model


def confused_classes(result: EnsembleResult) -> list[tuple[int, int, int]]:
    """(class, other class, queries): pairs by how many queries of one have their nearest image in the other."""
    classes, gallery = result.test.classes, result.test.gallery_classes
    wrong = (result.ranks["ensemble"][: result.queries] > 0).nonzero()[0]
    rivals = (classes if gallery is None else gallery)[result.scan.rival[wrong]]
    pairs = zip(classes[wrong].tolist(), rivals.tolist(), strict=True)
    counted = Counter((min(pair), max(pair)) for pair in pairs)
    return [(one, other, count) for (one, other), count in counted.most_common()]


def verdict(
    result: EnsembleResult,
    names: Sequence[str] = (),
    *,
    unseen: bool = False,
    untrained: EnsembleResult | None = None,
) -> list[str]:
    """Sentences for people. `names`: of the classes, by number; `unseen`: whether the model was not trained on them."""
    whole = result.recall["ensemble"]
    first = min(whole)
    count = len(result.test.all_classes.unique())
    right = "the right class comes first" if first == 1 else f"the right class is among the first {first}"
    change = ""
    if untrained is not None and first in untrained.recall["ensemble"]:
        gain = whole[first] - untrained.recall["ensemble"][first]
        change = f", {abs(gain):.1f} points {'more' if gain >= 0 else 'less'} than before training"
    said = [
        f"Measured on {result.queries:,} images of {count:,} classes{' that were not trained on' if unseen else ''}.",
        f"For {whole[first]:.1f}% of them {right}{change}.",
    ]
    if untrained is not None and untrained.recall["ensemble"].get(1, 0.0) >= EASY:
        said.append("These classes are too easy to tell apart to show what training does.")
    pairs = confused_classes(result)
    if pairs and names:
        one, other, times = pairs[0]
        said.append(
            f"The two classes that it confuses most: {printable(names[one])} and {printable(names[other])} "
            f"({times:,} image{'s' * (times > 1)})."
        )
    return said
