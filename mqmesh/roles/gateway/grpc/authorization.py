"""Users of clients by gRPC: the signer of each call. Pure.

The header ``authorization`` is ``MQv2-HMAC-SHA1 Credential=<access key>/…, SignedHeaders=
x-mq-date-time, Signature=<hex>``. The signature is over that one header, so who sees a call can
repeat its headers with another request: beyond one machine it protects nothing without TLS. How old
the date is does not matter, since some clients write their local time and call it UTC.
"""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

from mqmesh.errors import NoPermission
from mqmesh.roles.gateway.users import GatewayUser

AUTHORIZATION: Final = "authorization"
DATE_TIME: Final = "x-mq-date-time"
ALGORITHM: Final = "MQv2-HMAC-SHA1"


def find_caller(headers: Mapping[str, str], users: Mapping[str, GatewayUser]) -> GatewayUser | None:
    """Return the user that a call is signed by; None for one that is not signed.

    Raises:
        NoPermission: The user is unknown, or the signature wrong.
    """
    algorithm, _, rest = headers.get(AUTHORIZATION, "").partition(" ")
    fields = dict(one.strip().partition("=")[::2] for one in rest.split(","))
    access_key = fields.get("Credential", "").partition("/")[0]
    if not access_key:
        return None  # clients without keys send the header, too
    user = users.get(access_key)
    secret = user.secret_key if user is not None else ""
    signature = sign_date(headers.get(DATE_TIME, ""), secret)
    given = fields.get("Signature", "").upper()
    if (
        user is None
        or algorithm != ALGORITHM
        or not hmac.compare_digest(signature.encode(), given.encode())
    ):
        raise NoPermission(
            f"the call is not signed by a user of the gateway: {access_key!r:.100} is unknown, "
            "or its secret key is another one"
        )
    return user


def sign_date(date: str, secret: str) -> str:
    """Return the signature of a call, as RocketMQ's clients make it.

    Args:
        date: Header ``x-mq-date-time`` of the call.
        secret: The user's secret key.
    """
    return hmac.new(secret.encode(), date.encode(), hashlib.sha1).hexdigest().upper()
