"""Build the page docs/results/language-models from the files that tools/lm_experiment.py wrote."""

import argparse
from pathlib import Path

from statetrack.report.language_model_page import write_language_models

PAGE = Path(__file__).parent.parent / "docs/results/language-models"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=PAGE, help="files of tools/lm_experiment.py")
    parser.add_argument("out", type=Path, nargs="?", default=PAGE)
    given = parser.parse_args()
    print(write_language_models(given.results, given.out))
