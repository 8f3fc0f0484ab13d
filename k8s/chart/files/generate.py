"""Generates a few tokens through the gateway's service, and fails unless all services took part."""

import os
import sys

from draftwire.client import Client

wanted = int(os.environ["NUM_TOKENS"])
with Client(
    os.environ["DRAFTWIRE_ADDRESS"],
    tls_ca=os.environ.get("DRAFTWIRE_TLS_CA"),
    tls_cert=os.environ.get("DRAFTWIRE_TLS_CERT"),
    tls_key=os.environ.get("DRAFTWIRE_TLS_KEY"),
    tls_target_name=os.environ.get("DRAFTWIRE_TLS_TARGET_NAME"),
    token=os.environ.get("DRAFTWIRE_TOKEN"),
    allow_plaintext=os.environ.get("DRAFTWIRE_ALLOW_PLAINTEXT") == "true",
) as client:
    completion = client.generate(
        "import os", max_tokens=wanted, min_tokens=wanted, wait_for_server_s=60.0, timeout_s=240.0
    )
generated, drafted = len(completion.token_ids), completion.num_draft_tokens
print(f"{generated} tokens in {completion.statistics.num_rounds} rounds, {drafted} draft tokens judged")
if generated != wanted:
    sys.exit(f"{wanted} tokens were asked for")
if os.environ["WANTS_DRAFTER"] == "true" and not drafted:
    sys.exit(f"no drafter took part: {completion.drafter_error or 'none was there in time'}")
