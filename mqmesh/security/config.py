"""Settings of security, the same for every role."""

import msgspec

from mqmesh.errors import ConfigError


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Security settings of a role: its keys, and the access list.

    Attributes:
        enable: Encrypt every tcp connection, let in only users of the access list, and serve only
            requests that it permits. Unix sockets are for processes of the role's own user.
        key_file: Keys of this role, made by `mqmesh key generate`. All replicas of a broker group
            have the same, and so have the processes beside them; so have all name servers and the
            coordinator.
        access_list_file: Access list; kept up to date by the role, which writes it when an
            administrator changes the list (`mqmesh acl apply`), and reads it again when it
            changed.
        insecure: Start without security in a data folder that was used with it before, as the
            option ``--insecure`` says. Otherwise such a start is refused.
        audit_log: Write changes and refusals, with their users, to ``audit.jsonl``, beside the
            access list.
    """

    enable: bool = False
    key_file: str = ""
    access_list_file: str = ""
    insecure: bool = False
    audit_log: bool = True

    def __post_init__(self) -> None:
        """Checks settings that belong together.

        Raises:
            ConfigError: Security is enabled without keys, or with ``insecure`` set as well.
        """
        if self.enable and self.insecure:
            raise ConfigError("security.enable and security.insecure are both set: leave one out")
        if self.enable and not self.key_file:
            raise ConfigError(
                "security.enable needs security.key_file; `mqmesh key generate` makes one"
            )
