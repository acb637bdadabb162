"""Tables of the state, and the way from those of an earlier version."""

from serve_app.jobs.database import Database
from serve_app.jobs.errors import StoreError
from serve_app.jobs.failpoints import reach

VERSION = 7

CAPACITY = """CREATE TABLE capacity (
    model TEXT NOT NULL,
    hour INTEGER NOT NULL,
    work DOUBLE PRECISION NOT NULL,
    seconds DOUBLE PRECISION NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    error DOUBLE PRECISION,
    PRIMARY KEY (model, hour)
)"""

OWNER = ("CREATE TABLE owner (epoch BIGINT NOT NULL)", "INSERT INTO owner VALUES (0)")

UPGRADES: dict[int, tuple[str, ...]] = {
    1: (
        "ALTER TABLE batches ADD COLUMN weight DOUBLE PRECISION",
        "ALTER TABLE batches ADD COLUMN input_tokens BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE batches ADD COLUMN cached_tokens BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE batches ADD COLUMN output_tokens BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE batches ADD COLUMN reasoning_tokens BIGINT NOT NULL DEFAULT 0",
    ),
    2: ("ALTER TABLE batches ADD COLUMN api_key TEXT NOT NULL DEFAULT ''",),
    3: (
        "CREATE INDEX batches_by_expiry ON batches (expires_at)",
        "CREATE TABLE contents_without_file (id TEXT PRIMARY KEY)",
    ),
    4: ("ALTER TABLE batches ADD COLUMN rights TEXT NOT NULL DEFAULT '{}'",),
    5: (
        "ALTER TABLE batches ADD COLUMN work DOUBLE PRECISION NOT NULL DEFAULT 0",
        "ALTER TABLE batches ADD COLUMN promised BOOLEAN NOT NULL DEFAULT FALSE",
        CAPACITY,
    ),
    6: OWNER,
}
"""Changes that bring a database of an earlier version to the next one."""

SCHEMA = """
CREATE TABLE files (
    number {number},
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes {int} NOT NULL,
    created_at {int} NOT NULL,
    expires_at {int},
    status TEXT NOT NULL
);
CREATE INDEX files_of_tenant ON files (tenant, number);
CREATE INDEX files_by_expiry ON files (expires_at);
CREATE TABLE batches (
    number {number},
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file TEXT NOT NULL,
    output_file TEXT NOT NULL,
    error_file TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT NOT NULL,
    retention_s {int} NOT NULL,
    state TEXT NOT NULL,
    model TEXT,
    errors TEXT NOT NULL,
    total {int} NOT NULL,
    completed {int} NOT NULL,
    failed {int} NOT NULL,
    unrun {int} NOT NULL,
    output_bytes {int} NOT NULL,
    error_bytes {int} NOT NULL,
    created_at {int} NOT NULL,
    expires_at {int} NOT NULL,
    in_progress_at {int},
    finalizing_at {int},
    completed_at {int},
    failed_at {int},
    expired_at {int},
    cancelling_at {int},
    cancelled_at {int},
    weight DOUBLE PRECISION,
    input_tokens {int} NOT NULL,
    cached_tokens {int} NOT NULL,
    output_tokens {int} NOT NULL,
    reasoning_tokens {int} NOT NULL,
    api_key TEXT NOT NULL,
    rights TEXT NOT NULL,
    work DOUBLE PRECISION NOT NULL,
    promised BOOLEAN NOT NULL
);
CREATE INDEX batches_of_tenant ON batches (tenant, number);
CREATE INDEX batches_by_state ON batches (state);
CREATE INDEX batches_by_input ON batches (input_file);
CREATE INDEX batches_by_expiry ON batches (expires_at);
CREATE TABLE finished (
    batch TEXT NOT NULL,
    line {int} NOT NULL,
    PRIMARY KEY (batch, line)
) {clustered};
CREATE TABLE contents_without_file (id TEXT PRIMARY KEY);
{capacity};
{owner};
"""
"""`finished` holds the input lines of open batches whose results are in the output or error file.
`contents_without_file` holds the ids of contents that may be there although they have no file: those of
uploads that are being added, and of files that were deleted. `capacity` holds the profiles of the models.
`owner` holds the epoch of the process that may write, see `Store`."""


def prepare(database: Database) -> None:
    """Make the tables where there are none, or bring them to this version.

    Raises:
        StoreError: They belong to a version that isn't known.
        DatabaseError: The database fails.
    """
    version = database.version()
    if version not in (0, VERSION, *UPGRADES):
        raise StoreError(f"{database.place}: written by another version ({version}, this one is {VERSION})")
    if not version:
        schema = SCHEMA.replace("{capacity}", CAPACITY).replace("{owner}", ";".join(OWNER))
        for name, word in database.dialect.items():
            schema = schema.replace(name, word)
        reach("store.create")
        database.change_schema([part for part in schema.split(";") if part.strip()], VERSION)
        reach("store.created")
        return
    while version < VERSION:
        database.change_schema(UPGRADES[version], version := version + 1)
