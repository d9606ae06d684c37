import pytest
from built_manifests import needs_kubectl, objects_of
from launching import launcher, started
from manifest_parts import OPERATORS_PORT, parts_of
from servers import free_ports

from distap.errors import FINISHED


@needs_kubectl
@pytest.mark.slow
def test_two_hosts_of_a_train_job_meet_with_its_own_arguments(tmp_path):
    """What the operator sets, but for the address and the port, which are this machine's."""
    parts = parts_of(objects_of("trainjob-cpu"))
    port = str(free_ports(1))
    told = parts.environment | {
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
        "HOME": str(tmp_path),
    }
    arguments = [one.replace(parts.first_host, "127.0.0.1").replace(OPERATORS_PORT, port) for one in parts.arguments]
    options = " ".join(arguments[: arguments.index(str(parts.recipe_file))])
    assert f"--rdzv-endpoint=127.0.0.1:{port}" in options
    command = launcher(options, "finish", tmp_path)
    with (
        started(command, tmp_path / "first", **told) as one,
        started(command, tmp_path / "second", **told | {"PET_NODE_RANK": "1"}) as other,
    ):
        assert (one.status(), other.status()) == (FINISHED, FINISHED)
    assert {path.name for path in tmp_path.glob("?.?")} == {"0.0", "1.0"}
