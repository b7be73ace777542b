"""Make every artifact of the papers, in the order in which they build on one another's cells."""

from __future__ import annotations

from types import ModuleType

import audit
import clip_norms
import common
import els_uls_training
import estimate_and_double
import fedavg
import field
import fresh_bins
import group_level
import images
import lora
import mean_estimation
import mechanism_tables
import near_exact
import noise_in_training
import privacy_unit
import record_selection
import user_level

FIGURES = (near_exact, group_level, user_level, privacy_unit, fedavg, fresh_bins)
STUDIES = (
    *(mean_estimation, estimate_and_double, noise_in_training, els_uls_training),
    *(record_selection, clip_norms, lora, images),
)
SCRIPTS: dict[ModuleType, dict[str, common.Artifact]] = {
    mechanism_tables: mechanism_tables.TABLES,
    field: field.artifacts(keep=False),
    audit: audit.STUDIES,
    **{script: script.FIGURES for script in FIGURES},
    **{script: script.STUDIES for script in STUDIES},
}


def main() -> None:
    """Make all, each noted in the manifest as soon as it is written."""
    run = common.started(common.options(__doc__).parse_args())
    for script, artifacts in SCRIPTS.items():
        assert script.__file__ is not None
        common.make(run, script.__file__, artifacts, artifacts)


if __name__ == "__main__":
    main()
