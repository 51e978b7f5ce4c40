"""The file of a coordinator is written as the golden file has it, and that is read."""

import importlib.util
import json

from mqmesh.storage.lmdb.coordinator_file import CoordinatorFile
from mqmesh.storage.lmdb.env import LmdbEnv
from mqmesh.units import MIB


def test_what_a_release_wrote_is_written_and_read(data_dir, tmp_path):
    spec = importlib.util.spec_from_file_location("make_golden", data_dir / "make_golden.py")
    golden = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(golden)
    found = golden.COORDINATOR_FILE.read_bytes()
    assert golden.encode_coordinator() == found
    env = LmdbEnv(tmp_path, map_size=MIB, durable=True)
    pairs = json.loads(found).items()
    env.write([(bytes.fromhex(key), bytes.fromhex(value)) for key, value in pairs])
    env.close()
    file = CoordinatorFile(tmp_path)
    file.close()
    assert file.records == golden.COORDINATOR.records
    assert file.sessions == golden.COORDINATOR.sessions
