"""A real broker of RocketMQ: what mqmesh promises to tell as it does."""

from __future__ import annotations

import pytest
from harness.rocketmq import families, golden_families, page_of_a_real_broker


@pytest.mark.timeout(420)  # it loads 80 MB the first time
def test_a_real_broker_tells_what_the_golden_file_says(tmp_path, project_root):
    golden = golden_families(project_root)
    page = page_of_a_real_broker(tmp_path, sorted(golden))
    told = {name: labels for name, labels in families(page).items() if "_pop_" not in name}
    assert told == golden
