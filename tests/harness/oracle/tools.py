"""Commands of mqadmin 4.9.8 in one virtual machine, and what they print."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from harness.java import java_command
from harness.oracle.scenes import Site
from harness.oracle.wire import plain
from harness.patience import until
from harness.rocketmq import rocketmq_jars

END_S = 60
COMMANDS = """\
updateTopic -c DefaultCluster -t TOPIC -r 2 -w 2
updateTopic -b BROKER -t TOPIC-2 -r 1 -w 1
updateTopicPerm -b BROKER -t TOPIC-2 -p 4
updateTopicPerm -c DefaultCluster -t TOPIC-2 -p 6
updateSubGroup -c DefaultCluster -g GROUP
updateSubGroup -b BROKER -g GROUP-2
clusterList
clusterList -m
topicRoute -t TOPIC
topicRoute -t TOPIC -l
topicRoute -t nowhere
topicClusterList -t TOPIC
sendMessage -t TOPIC -p hello -k k1 -c tag -b NAME -i 1
topicStatus -t TOPIC
topicStatus -t nowhere
queryMsgByKey -t TOPIC -k k1
queryMsgByUniqueKey -t TOPIC -i UNIQUE
queryMsgByOffset -t TOPIC -b NAME -i 1 -o 0
queryMsgById -i OFFSET_ID
queryMsgByOffset -t TOPIC -b NAME -i 1 -o 9
printMsg -t TOPIC
printMsgByQueue -t TOPIC -a NAME -i 1 -p true -f true
consumeMessage -t TOPIC -b NAME -i 1 -o 0 -c 1
queryCq -t TOPIC -q 1 -i 0 -b BROKER
queryMsgTraceById -i UNIQUE
sendMsgStatus -b NAME -s 10 -c 1
brokerStatus -b BROKER
brokerConsumeStats -b BROKER
producerConnection -g nobody -t TOPIC
consumerConnection -g GROUP
consumerStatus -g GROUP
getConsumerConfig -g GROUP
producer -b BROKER
cloneGroupOffset -s GROUP -d GROUP-2 -t TOPIC -o true
resetOffsetByTime -g GROUP -t TOPIC -s 0
consumerProgress -g GROUP
skipAccumulatedMessage -g GROUP -t TOPIC
updateKvConfig -s tools -k a -v 1
deleteKvConfig -s tools -k a
updateOrderConf -m put -t TOPIC-2 -v NAME:2
updateOrderConf -m get -t TOPIC-2
updateOrderConf -m delete -t TOPIC-2
wipeWritePerm -b NAME
addWritePerm -b NAME
getNamesrvConfig
updateNamesrvConfig -k clusterTest -v false
getBrokerConfig -b BROKER
updateBrokerConfig -b BROKER -k transactionCheckMax -v 15
cleanExpiredCQ -b BROKER
cleanUnusedTopic -b BROKER
deleteExpiredCommitLog -b BROKER
statsAll -t TOPIC
allocateMQ -t TOPIC -i 10.0.0.1,10.0.0.2
checkMsgSendRT -t TOPIC -a 3 -s 10
exportMetadata -c DefaultCluster -f FOLDER -t
exportConfigs -c DefaultCluster -f FOLDER
exportMetrics -c DefaultCluster -f FOLDER
clusterAclConfigVersion -b BROKER
updateAclConfig -b BROKER -a tools -s tools-secret
deleteAclConfig -b BROKER -a tools
updateGlobalWhiteAddr -b BROKER -g 10.0.0.1
deleteSubGroup -c DefaultCluster -g GROUP
deleteSubGroup -c DefaultCluster -g GROUP-2
deleteTopic -c DefaultCluster -t TOPIC
deleteTopic -c DefaultCluster -t TOPIC-2
""".strip().splitlines()
_ID = re.compile(r"^[0-9A-F]{32,56}\b", re.MULTILINE)
_MESSAGE_ID = re.compile(r"\b[0-9A-F]{32,56}\b")
_NUMBER = re.compile(r"(?<!CODE: )(?<!\d)-?\d+(\.\d+)?%?")
_LEFT_OUT = re.compile(r"at [\w.$/]+#?\(|\.\.\. # more|See https|For more information")
"""Lines of a stack, and where to read more about an error."""
_HOME = re.compile(r"/\S*/oracle-\w+")
_DESCRIPTION = re.compile(r"DESC: .*")
_HOST = re.compile(r"\d+\.\d+\.\d+\.\d+(?!\S)")
"""Address without a port: of a client whose connection is at another worker of the gateway."""


class MqAdmin:
    """Commands of mqadmin in one virtual machine.

    Attributes:
        namesrv: Address of the name server that they ask.
    """

    def __init__(self, process: subprocess.Popen[str], namesrv: str) -> None:
        self._process = process
        self.namesrv = namesrv

    def __call__(self, command: str, *arguments: str) -> str:
        """Runs a command and returns what it prints."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = "\t".join((command, *arguments, "-n", self.namesrv))
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        said = ""
        for text in self._process.stdout:
            if text == "@@\n":
                return said
            said += text
        raise AssertionError(f"mqadmin {command} ended everything: {said[-2_000:]}")

    def well(self, command: str, *arguments: str) -> str:
        """Runs a command that must not fail, and returns what it prints."""
        said = self(command, *arguments)
        assert "Exception" not in said, f"{command}: {said[:2_000]}"
        return said


@contextmanager
def mqadmin(namesrv: str, folder: Path) -> Iterator[MqAdmin]:
    """Commands of mqadmin 4.9.8.

    Args:
        namesrv: Address of the name server.
        folder: For its settings and files.
    """
    (folder / "conf").mkdir()
    (folder / "conf" / "logback_tools.xml").write_text("<configuration/>")
    jars = rocketmq_jars("4.9.8", ("rocketmq-tools",))
    homes = (f"-Drocketmq.home.dir={folder}", f"-Duser.home={folder}")
    process = subprocess.Popen(
        java_command("MqAdmin", jars, "-Drocketmq.client.logUseSlf4j=true", *homes),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,  # some commands write files
    )
    try:
        yield MqAdmin(process, namesrv)
    finally:
        process.communicate(timeout=END_S)
    assert process.returncode == 0


def tool_answers(admin: MqAdmin, folder: Path) -> dict[str, Any]:
    """Runs the commands one after the other; lines of each, as they are compared.

    Args:
        admin: Runs them.
        folder: For files that they write.
    """
    site = Site(admin.namesrv, "tools")
    words = {
        "TOPIC": "tool-topic",
        "GROUP": "tool-group",
        "BROKER": site.broker_address,
        "NAME": site.broker_name,
        "FOLDER": str(folder),
    }
    found = {}
    for command in COMMANDS:
        line = [_filled(word, words) for word in command.split()]
        if line[0] == "queryMsgByKey":
            until(partial(_finds, admin, line))  # an index is a moment behind
        said = admin(*line)
        for unique in _ID.findall(said):
            words["UNIQUE"] = unique
        for offset_id in re.findall(r"OffsetID: +(\w+)", said):
            words["OFFSET_ID"] = offset_id
        if line[0] in ("brokerConsumeStats", "producer"):  # of all clients
            said = "\n".join(one for one in said.splitlines() if "tool-" in one)
        found[command] = printed(said, {"folder": words["FOLDER"], "broker": words["NAME"]})
    return found


def _finds(admin: MqAdmin, line: list[str]) -> bool:
    return _ID.search(admin(*line)) is not None


def _filled(word: str, words: dict[str, str]) -> str:
    for name, value in words.items():
        word = re.sub(rf"\b{name}\b", value, word)
    return word


def printed(said: str, words: Mapping[str, str]) -> dict[str, bool]:
    """Return the lines of a command's output, without what differs in each run.

    Args:
        said: The output.
        words: Texts that are replaced by their names.
    """
    found = {}
    for line in said.splitlines():
        for name, word in words.items():
            line = line.replace(word, f"<{name}>")
        line = _HOME.sub("<home>", line)
        line = _HOST.sub(
            "<address>", _DESCRIPTION.sub("DESC", _MESSAGE_ID.sub("<id>", plain(line)))
        )
        line = " ".join(_NUMBER.sub("#", line).split())
        if line and not _LEFT_OUT.match(line):
            found[line] = True
    return found
