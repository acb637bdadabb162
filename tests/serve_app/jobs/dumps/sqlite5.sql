BEGIN TRANSACTION;
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file TEXT NOT NULL,
    output_file TEXT NOT NULL,
    error_file TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT NOT NULL,
    retention_s INTEGER NOT NULL,
    state TEXT NOT NULL,
    model TEXT,
    errors TEXT NOT NULL,
    total INTEGER NOT NULL,
    completed INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    unrun INTEGER NOT NULL,
    output_bytes INTEGER NOT NULL,
    error_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    weight DOUBLE PRECISION,
    input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL,
    api_key TEXT NOT NULL,
    rights TEXT NOT NULL
);
INSERT INTO "batches" VALUES(1,'b','anna','/v1/chat/completions','in-b','file-b-out','file-b-err','24h','{"a":"ü"}',86400,'in_progress','demo','[]',3,1,1,0,10,20,1800000000,1800086400,1800000001,NULL,NULL,NULL,NULL,NULL,NULL,2.5,0,0,0,0,'ada','{"models":["demo"],"max_lines":7}');
INSERT INTO "batches" VALUES(2,'c','anna','/v1/chat/completions','in-b','file-c-out','file-c-err','24h','{"a":"ü"}',86400,'validating',NULL,'[]',0,0,0,0,0,0,1800000000,1800086400,NULL,NULL,NULL,NULL,NULL,NULL,NULL,2.5,0,0,0,0,'ada','{"models":["demo"],"max_lines":7}');
CREATE TABLE contents_without_file (id TEXT PRIMARY KEY);
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    status TEXT NOT NULL
);
INSERT INTO "files" VALUES(1,'in-b','anna','in.jsonl','batch',100,1800000000,NULL,'processed');
INSERT INTO "files" VALUES(2,'free','ben','ü.jsonl','batch',5,1800000000,1800000009,'processed');
CREATE TABLE finished (
    batch TEXT NOT NULL,
    line INTEGER NOT NULL,
    PRIMARY KEY (batch, line)
) WITHOUT ROWID;
INSERT INTO "finished" VALUES('b',1);
INSERT INTO "finished" VALUES('b',3);
CREATE INDEX files_of_tenant ON files (tenant, number);
CREATE INDEX files_by_expiry ON files (expires_at);
CREATE INDEX batches_of_tenant ON batches (tenant, number);
CREATE INDEX batches_by_state ON batches (state);
CREATE INDEX batches_by_input ON batches (input_file);
CREATE INDEX batches_by_expiry ON batches (expires_at);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('files',2);
INSERT INTO "sqlite_sequence" VALUES('batches',2);
COMMIT;
PRAGMA user_version = 5;
