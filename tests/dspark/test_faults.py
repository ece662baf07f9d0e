"""With each fault put in, a detector that passes without it must fail.

The list is that of the specification's last section; `test_generate.py` shows the detectors passing in many settings.
"""

import functools
from dataclasses import replace

import detectors
import faults
import pytest

PREFIX = list(range(4, 30))

proposals = detectors.proposals_follow_the_specification
law = detectors.output_law_is_the_targets
table_follows_a_refit = functools.partial(detectors.derived_weight_follows_a_refit, arm="table")
table_is_made_by_the_hook_alone = functools.partial(detectors.derived_weight_is_made_by_the_hook_alone, arm="table")
FAULTS = [
    (faults.stale_after_refit, detectors.derived_weight_follows_a_refit),
    (faults.rebound_after_refit, detectors.derived_weight_follows_a_refit),
    (faults.none_after_dummy_load, detectors.derived_weight_is_made_by_the_hook_alone),
    (faults.first_pipeline_rank_only, functools.partial(detectors.derived_weight_is_made_by_the_hook_alone, rank=1)),
    (faults.stale_table_after_refit, table_follows_a_refit),
    (faults.rebound_table_after_refit, table_follows_a_refit),
    (faults.table_follows_the_draft_alone, table_follows_a_refit),
    (faults.no_table_after_dummy_load, table_is_made_by_the_hook_alone),
    (faults.one_position_early, proposals),
    (faults.markov_row_of_the_next_base_row, proposals),
    (faults.markov_of_the_anchor_alone, proposals),
    (faults.causal_inside_the_block, proposals),
    (faults.compressed_layers_theta, proposals),
    (faults.noise_is_padding, proposals),
    (faults.context_missing_on_a_prefix_hit, functools.partial(proposals, prefix=PREFIX)),
    (faults.rejected_rows_shift_the_context, proposals),
    (faults.aux_layer_off_by_one, detectors.aux_states_are_block_outputs),
    (faults.draft_at_another_temperature, proposals),
    (faults.q_before_the_markov_correction, proposals),
    (faults.q_before_the_markov_correction, law),
    (faults.q_at_another_temperature, law),
    (faults.draft_shares_the_acceptance_stream, law),
    (faults.draft_shares_the_target_stream, law),
    (faults.residual_of_the_target_itself, law),
    (faults.cut_after_verification, functools.partial(law, threshold=0.7)),
    (faults.noise_depends_on_the_place_in_the_batch, detectors.requests_ignore_their_neighbours),
    (faults.length_without_the_bonus, detectors.mean_length_counts_the_bonus),
    (faults.tokens_behind_the_end, detectors.nothing_follows_the_end),
    (faults.padding_taken_for_prompt, detectors.requests_ignore_their_neighbours),
    (faults.padded_rows_are_kept, detectors.requests_ignore_their_neighbours),
    (faults.dropped_by_a_name_map, detectors.every_tensor_is_loaded),
]


def run(detector, tmp_path):
    if detector is detectors.every_tensor_is_loaded:
        detector(tmp_path)
    else:
        detector()


@pytest.mark.parametrize(("fault", "detector"), FAULTS, ids=lambda item: getattr(item, "__name__", ""))
def test_the_fault_is_found(fault, detector, monkeypatch, tmp_path):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run(detector, tmp_path)


@pytest.mark.parametrize(
    "detector",
    [
        detectors.derived_weight_follows_a_refit,
        detectors.derived_weight_is_made_by_the_hook_alone,
        table_follows_a_refit,
        table_is_made_by_the_hook_alone,
        functools.partial(detectors.derived_weight_is_made_by_the_hook_alone, rank=1),
        detectors.aux_states_are_block_outputs,
        detectors.mean_length_counts_the_bonus,
        detectors.every_tensor_is_loaded,
    ],
)
def test_without_a_fault_the_detector_passes(detector, tmp_path):
    """The other detectors pass in `test_generate.py`."""
    run(detector, tmp_path)


def test_a_noise_token_equal_to_padding_is_refused():
    config = detectors.make_pair()[0].config
    with pytest.raises(ValueError, match="noise_token_id must differ from pad_token_id"):
        replace(config, noise_token_id=config.pad_token_id)
