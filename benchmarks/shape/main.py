"""Prints the shape of a checkout in numbers: ``scripts/shape`` runs it."""

import argparse
import json
from pathlib import Path

from shape import calls, source

ROOT = Path(__file__).resolve().parents[2]


def measured(root: Path, *, with_calls: bool) -> dict[str, object]:
    """Return each measure by its name.

    Args:
        root: The checkout.
        with_calls: Start a cluster, and count what a message passes through.
    """
    files = source.product_files(root)
    modules, functions = source.users_of("BrokerContext", files)
    found: dict[str, object] = {
        "product lines": source.lines_of(root, *source.PRODUCT),
        "test lines": source.lines_of(root, "tests"),
        "modules that import BrokerContext": modules,
        "functions that take BrokerContext": functions,
        "modules that import the broker's Core": source.users_of("Core", files)[0],
        "folders of the broker in knots": sum(map(len, source.knots(root))),
        "docstrings that begin with a riddle": source.riddles(files),
        "lines with told or tells": source.told_lines(files),
        "lambdas over self": source.lambdas_over_self(files),
        "structs of five callables and more": len(source.callback_bundles(files)),
        "words in docs, by hand": source.words_of(root, made=False),
        "words in docs/reference, made": source.words_of(root, made=True),
        "lines of the changelog": (root / "CHANGELOG.md").read_text().count("\n"),
    }
    if with_calls:
        for name, (of_modules, of_calls) in calls.measure().items():
            found[f"modules, calls: {name}"] = f"{of_modules}, {of_calls}"
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="scripts/shape", description=__doc__)
    parser.add_argument("--no-calls", action="store_true", help="look at the source alone")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = measured(ROOT, with_calls=not options.no_calls)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
