"""Generates a few tokens through the gateway's service, and fails unless all services took part."""

import os
import sys

from draftwire.client import Client

wanted, wants_drafter = int(os.environ["NUM_TOKENS"]), os.environ["WANTS_DRAFTER"] == "true"
with Client(
    os.environ["DRAFTWIRE_ADDRESS"],
    tls_ca=os.environ.get("DRAFTWIRE_TLS_CA"),
    tls_cert=os.environ.get("DRAFTWIRE_TLS_CERT"),
    tls_key=os.environ.get("DRAFTWIRE_TLS_KEY"),
    tls_target_name=os.environ.get("DRAFTWIRE_TLS_TARGET_NAME"),
    token=os.environ.get("DRAFTWIRE_TOKEN"),
    allow_plaintext=os.environ.get("DRAFTWIRE_ALLOW_PLAINTEXT") == "true",
) as client:
    options = {"max_tokens": wanted, "min_tokens": wanted, "timeout_s": 120.0}
    completion = client.generate("import os", wait_for_server_s=60.0, **options)
    drafters = [drafter.name for drafter in client.server().drafters] if wants_drafter else []
    if drafters:  # not drafts of the verifier's own
        completion = client.generate("import os", drafter=drafters, num_speculative_tokens=2, **options)
generated, drafted = len(completion.token_ids), completion.num_draft_tokens
print(f"{generated} tokens in {completion.statistics.num_rounds} rounds, {drafted} draft tokens judged")
if generated != wanted:
    sys.exit(f"{wanted} tokens were asked for")
if wants_drafter and not (drafters and drafted):
    sys.exit(f"no drafter took part: {completion.drafter_error or 'none was there in time'}")
