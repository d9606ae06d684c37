"""What the API server refuses though no schema says so, from its validation (pkg/apis of Kubernetes 1.37)."""

import re
from ipaddress import ip_network

from manifest_parts import Parts

LONGEST_PORT_NAME = 15
LARGEST_CONFIG_MAP = 2**20
LARGEST_EXIT_CODE = 255


def the_api_server_takes_it(parts: Parts) -> None:
    _ports_are_distinct(parts)
    _affinity_has_no_key_twice(parts)
    _exit_codes_are_in_order(parts)
    _exceptions_are_inside(parts)
    size = sum(len(name.encode()) + len(text.encode()) for name, text in parts.one("ConfigMap")["data"].items())
    assert size <= LARGEST_CONFIG_MAP


def _ports_are_distinct(parts: Parts) -> None:
    ports = parts.container["ports"]
    for key in ("name", "containerPort"):
        assert len({port[key] for port in ports}) == len(ports)
    for port in ports:
        name = port["name"]
        assert len(name) <= LONGEST_PORT_NAME, name
        assert re.fullmatch(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*", name), name


def _affinity_has_no_key_twice(parts: Parts) -> None:
    affinity = parts.pod["affinity"]
    terms = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    near = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    for term in [*terms, *(one["podAffinityTerm"] for one in near)]:
        assert not set(term["matchLabelKeys"]) & set(term["labelSelector"]["matchLabels"])


def _exit_codes_are_in_order(parts: Parts) -> None:
    for rule in parts.job["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            codes = rule["onExitCodes"]["values"]
            assert codes == sorted(set(codes)) and codes[0] > 0 and codes[-1] <= LARGEST_EXIT_CODE


def _exceptions_are_inside(parts: Parts) -> None:
    policy = parts.one("NetworkPolicy")["spec"]
    blocks = [peer["ipBlock"] for rule in policy["egress"] for peer in rule.get("to", []) if "ipBlock" in peer]
    assert blocks
    for block in blocks:
        whole = ip_network(block["cidr"])
        for part in map(ip_network, block.get("except", [])):
            assert part.version == whole.version and part != whole and part.subnet_of(whole)  # type: ignore[arg-type]
