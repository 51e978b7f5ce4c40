"""Loading a configuration, and what is said about a wrong one."""

from __future__ import annotations

import enum
import time
import tomllib
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.config import _load_toml, dump_toml, key_names, load_config, parse_config, read_toml
from mqmesh.errors import ConfigError


class Flush(enum.Enum):
    """Two ways."""

    ASYNC_FLUSH = "ASYNC_FLUSH"
    SYNC_FLUSH = "SYNC_FLUSH"


class Store(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table inside."""

    flush_disk_type: Flush = Flush.ASYNC_FLUSH
    flush_interval_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 500


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of every kind."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=20)] = "a"
    ratio: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.75
    enabled: bool = True
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    peers: list[str] = []
    rooms: dict[str, int] = {}
    mode: Literal["", "otel"] = ""
    store: Store = Store()
    more: list[Store] = []

    def __post_init__(self) -> None:
        if self.name == "both" and self.enabled:
            raise ValueError("name = 'both' needs enabled = false")


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "x.toml"
        path.write_text(text)
        return path

    return write


def refusal(text, *overrides):
    with pytest.raises(ConfigError) as caught:
        parse_config(Settings, text, "x.toml", overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_a_file_the_defaults_hold():
    assert load_config(Settings) == Settings()


def test_a_file_fills_the_struct(write):
    path = write('name = "b"\n[store]\nflush_disk_type = "SYNC_FLUSH"\n')
    config = load_config(Settings, path)
    assert config == Settings(name="b", store=Store(flush_disk_type=Flush.SYNC_FLUSH))


def test_one_table_of_a_file_can_be_loaded(write):
    path = write("[inner.broker]\nratio = 0.5\n")
    assert load_config(Settings, path, "inner.broker").ratio == 0.5


def test_a_missing_table_is_named_with_those_that_are_there(write):
    path = write("[broker]\n[namesrv]\n")
    with pytest.raises(ConfigError, match=r"no table \[brocker\]; the file has broker, namesrv"):
        load_config(Settings, path, "brocker")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file or directory"):
        load_config(Settings, tmp_path / "nowhere.toml")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(Settings, tmp_path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match="not UTF-8 at byte 8"):
        load_config(Settings, path)


PARTS = {
    "key": "{} = 1",
    "spaced key": "{} = 1".replace(".", " . "),
    "table": "[{}]",
    "array of tables": "[[{}]]",
    "inline table": "x = {{ {} = 1 }}",
    "behind strings": 'x = ["a", "\\"b", \'c\', """d\n"" """, \'\'\'e\n\'\'\']\n{} = 1',
}


@pytest.mark.parametrize("form", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("part", ["a", '"a b"', "'a.b'"])
def test_a_key_of_very_many_parts_is_refused_without_parsing_it(form, part):
    began_s = time.process_time()
    text = form.format(".".join([part] * 100_001))
    with pytest.raises(ConfigError, match="100,001 parts; at most 16 are allowed"):
        parse_config(Settings, text, "text")
    assert time.process_time() - began_s < 5.0, "it took 40 s"


@pytest.mark.parametrize(
    "text",
    [
        "# " + "a." * 100,
        'x = "' + "a." * 100 + '"',
        "x = '" + "a." * 100 + "'",
        'x = """\n' + "a." * 100 + '\n\\""" a"""""',
        "x = '''\n" + "a." * 100 + "\n'' a'''",
        "a." * 15 + "a = 1",
        "x = 1" + "0" * 200,
        "x = 1.5\ny = 1979-05-27T07:32:00.999999-07:00",
    ],
)
def test_dots_elsewhere_are_no_parts_of_a_key(text):
    assert _load_toml(text) == tomllib.loads(text)


def test_an_override_has_no_more_parts_either():
    with pytest.raises(ConfigError, match="has 100,000 parts; at most 16"):
        parse_config(Settings, "", "text", ["a." * 99_999 + "a=1"])


@pytest.mark.parametrize("text", ["x = " + "9" * 5_000, "x = " + "[" * 50_000])
def test_numbers_and_arrays_without_end_are_refused(text):
    with pytest.raises(ConfigError, match="not TOML"):
        parse_config(Settings, text, "text")


@pytest.mark.parametrize("mark", ['"', "'", '"""', "'''", '\\"', '"""\\"', "\\", '"a'])
def test_strings_that_never_end_cost_no_time(mark):
    began_s = time.process_time()
    with pytest.raises(ConfigError):
        parse_config(Settings, "x = " + mark * 100_000, "text")
    assert time.process_time() - began_s < 5.0


def test_a_huge_file_is_refused(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        load_config(Settings, path)


@pytest.mark.parametrize("text", ["name =", "a = " + "[" * 3000, "a = 1\na = 2", "\x00"])
def test_what_is_not_toml_is_refused(text):
    assert refusal(text).startswith("x.toml: not TOML: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmae = 'x'", "x.toml: unknown key nmae; did you mean name?"),
        (
            "[store]\nflush_interval = 9",
            "x.toml: unknown key store.flush_interval; did you mean store.flush_interval_ms?",
        ),
        (
            "[[more]]\n[[more]]\nflush_interval = 9",
            "x.toml: unknown key more.1.flush_interval; did you mean more.1.flush_interval_ms?",
        ),
        (
            "[store]\nzzz = 9",
            "x.toml: unknown key store.zzz; known are flush_disk_type, flush_interval_ms",
        ),
        (
            "[store]\nflush_interval_ms = 5",
            "x.toml: store.flush_interval_ms = 5: must be a whole number of 10 to 60,000",
        ),
        (
            "[store]\nflush_interval_ms = '5'",
            "x.toml: store.flush_interval_ms = '5': must be a whole number of 10 to 60,000",
        ),
        (
            "[store]\nflush_disk_type = 'SYNC'",
            "x.toml: store.flush_disk_type = 'SYNC': must be one of ASYNC_FLUSH, SYNC_FLUSH",
        ),
        ("mode = 'otl'", "x.toml: mode = 'otl': must be one of '' (nothing), otel"),
        ("name = ''", "x.toml: name = '': must be text of 1 to 20 characters"),
        ("name = 5", "x.toml: name = 5: must be text of 1 to 20 characters"),
        ("ratio = 1.0", "x.toml: ratio = 1.0: must be a number of more than 0 to less than 1"),
        ("enabled = 1", "x.toml: enabled = 1: must be true or false"),
        ("limit = 0", "x.toml: limit = 0: must be a whole number from 1 or left out"),
        ("peers = [1]", "x.toml: peers.0 = 1: must be text"),
        ("peers = 1", "x.toml: peers = 1: must be a list of text"),
        ("store = 1", "x.toml: store = 1: must be a table"),
        ("rooms = {a = 'b'}", "x.toml: rooms = {'a': 'b'}: Expected `int`, got `str`"),
        ("name = 'both'", "x.toml: name = 'both' needs enabled = false"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(text, message):
    assert refusal(text) == message


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xef\xbb\xbfname = 'a'\r\n")
    assert read_toml(path) == {"name": "a"}


def test_a_required_key_that_is_missing_is_named():
    class Strict(msgspec.Struct):
        inner: Settings
        port: int

    with pytest.raises(ConfigError, match=r"x\.toml: port is missing"):
        parse_config(Strict, "[inner]", "x.toml")


def test_an_error_of_the_struct_itself_names_the_file():
    class Picky(msgspec.Struct):
        a: int = 1

        def __post_init__(self) -> None:
            raise ConfigError("a = 1 will not do")

    with pytest.raises(ConfigError, match=r"^x\.toml: a = 1 will not do$"):
        parse_config(Picky, "", "x.toml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("name=b", Settings(name="b")),
        ("name=123", Settings(name="123")),
        ("name='b c'", Settings(name="b c")),
        ("name=a=b", Settings(name="a=b")),
        ("ratio = 0.5", Settings(ratio=0.5)),
        ("enabled=false", Settings(enabled=False)),
        ("limit=7", Settings(limit=7)),
        ("peers=['a', 'b']", Settings(peers=["a", "b"])),
        ("rooms.first=4", Settings(rooms={"first": 4})),
        ("store.flush_interval_ms=20", Settings(store=Store(flush_interval_ms=20))),
        (
            "store.flush_disk_type=SYNC_FLUSH",
            Settings(store=Store(flush_disk_type=Flush.SYNC_FLUSH)),
        ),
    ],
)
def test_an_override_wins_over_the_file(override, expected):
    assert parse_config(Settings, "", "x.toml", [override]) == expected


def test_an_override_reaches_into_a_list_of_tables():
    config = parse_config(Settings, "[[more]]\n[[more]]", "x.toml", ["more.1.flush_interval_ms=20"])
    assert [one.flush_interval_ms for one in config.more] == [500, 20]


def test_the_last_override_wins():
    assert parse_config(Settings, "", "x.toml", ["limit=1", "limit=2"]).limit == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name", "--set 'name': must have the form key=value"),
        ("=1", "--set '=1': must have the form key=value"),
        ("a..b=1", "--set 'a..b=1': must have the form key=value"),
        ("nmae=x", "--set: unknown key nmae; did you mean name?"),
        ("limit=x", "--set: limit = 'x': must be a whole number from 1 or left out"),
        ("name.x=1", "--set 'name.x=1': there is no table that could hold 'x'"),
        ("more.2.x=1", "--set 'more.2.x=1': '2' must be a number below 1"),
        ("more.x.x=1", "--set 'more.x.x=1': 'x' must be a number below 1"),
    ],
)
def test_a_wrong_override_is_told_in_one_line(override, message):
    assert refusal("name = 'a'\n[[more]]", override) == message


def test_an_override_cannot_smuggle_in_a_second_key():
    config = parse_config(Settings, "", "x.toml", ["name=1\nratio=0.1"])
    assert config == Settings(name="1\nratio=0.1")


def test_every_key_is_known_by_its_dotted_name():
    assert key_names(Settings) == [
        "name",
        "ratio",
        "enabled",
        "limit",
        "peers",
        "rooms",
        "mode",
        "store.flush_disk_type",
        "store.flush_interval_ms",
        "more",
    ]


def test_a_dump_shows_every_key_that_has_a_value():
    dump = dump_toml(Settings(rooms={"a b": 1}, more=[Store(), Store()]))
    assert dump.startswith('name = "a"\nratio = 0.75\nenabled = true\npeers = []\n')
    assert '[rooms]\n"a b" = 1\n' in dump
    assert dump.count("[[more]]\n") == 2


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(
    st.builds(
        Settings,
        name=texts.filter(lambda name: name != "both"),
        enabled=st.booleans(),
        ratio=st.floats(0.01, 0.99),
        peers=st.lists(texts),
        rooms=st.dictionaries(texts, st.integers(-(2**63), 2**63 - 1)),
        limit=st.none() | st.integers(1, 2**63 - 1),
        more=st.lists(st.builds(Store, flush_interval_ms=st.integers(10, 60_000)), max_size=3),
    )
)
def test_a_dump_reads_back_as_it_was(config):
    assert parse_config(Settings, dump_toml(config), "dump") == config
