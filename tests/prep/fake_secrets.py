"""Keys and tokens that the local servers know and that no output may show."""

from __future__ import annotations

SECRETS = {
    "access": "AKTEST0123456789",
    "secret": "sk-very-secret-value",
    "token": "sts-secret-token",
    "hub": "hf_SecretHubToken",
}
KEYS = {SECRETS["access"]: {"secret": SECRETS["secret"]}}
