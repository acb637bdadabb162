CREATE TABLE public.batches (
    number bigint NOT NULL,
    id text NOT NULL,
    tenant text NOT NULL,
    endpoint text NOT NULL,
    input_file text NOT NULL,
    output_file text NOT NULL,
    error_file text NOT NULL,
    completion_window text NOT NULL,
    metadata text NOT NULL,
    retention_s bigint NOT NULL,
    state text NOT NULL,
    model text,
    errors text NOT NULL,
    total bigint NOT NULL,
    completed bigint NOT NULL,
    failed bigint NOT NULL,
    unrun bigint NOT NULL,
    output_bytes bigint NOT NULL,
    error_bytes bigint NOT NULL,
    created_at bigint NOT NULL,
    expires_at bigint NOT NULL,
    in_progress_at bigint,
    finalizing_at bigint,
    completed_at bigint,
    failed_at bigint,
    expired_at bigint,
    cancelling_at bigint,
    cancelled_at bigint,
    weight double precision,
    input_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    output_tokens bigint NOT NULL,
    reasoning_tokens bigint NOT NULL,
    api_key text NOT NULL,
    rights text NOT NULL,
    work double precision NOT NULL,
    promised boolean NOT NULL
);
CREATE SEQUENCE public.batches_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.batches_number_seq OWNED BY public.batches.number;
CREATE TABLE public.capacity (
    model text NOT NULL,
    hour integer NOT NULL,
    work double precision NOT NULL,
    seconds double precision NOT NULL,
    at double precision NOT NULL,
    error double precision
);
CREATE TABLE public.contents_without_file (
    id text NOT NULL
);
CREATE TABLE public.files (
    number bigint NOT NULL,
    id text NOT NULL,
    tenant text NOT NULL,
    filename text NOT NULL,
    purpose text NOT NULL,
    bytes bigint NOT NULL,
    created_at bigint NOT NULL,
    expires_at bigint,
    status text NOT NULL
);
CREATE SEQUENCE public.files_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.files_number_seq OWNED BY public.files.number;
CREATE TABLE public.finished (
    batch text NOT NULL,
    line bigint NOT NULL
);
CREATE TABLE public.owner (
    epoch bigint NOT NULL
);
CREATE TABLE public.saturate_version (
    version bigint NOT NULL
);
ALTER TABLE ONLY public.batches ALTER COLUMN number SET DEFAULT nextval('public.batches_number_seq'::regclass);
ALTER TABLE ONLY public.files ALTER COLUMN number SET DEFAULT nextval('public.files_number_seq'::regclass);
INSERT INTO public.batches VALUES (2, 'c', 'anna', '/v1/chat/completions', 'in-b', 'file-c-out', 'file-c-err', '24h', '{"a":"ü"}', 86400, 'validating', NULL, '[]', 0, 0, 0, 0, 0, 0, 1800000000, 1800086400, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 2.5, 0, 0, 0, 0, 'ada', '{"models":["demo"],"max_lines":7}', 2.5, true);
INSERT INTO public.batches VALUES (1, 'b', 'anna', '/v1/chat/completions', 'in-b', 'file-b-out', 'file-b-err', '24h', '{"a":"ü"}', 86400, 'in_progress', 'demo', '[]', 3, 1, 1, 0, 10, 20, 1800000000, 1800086400, 1800000001, NULL, NULL, NULL, NULL, NULL, NULL, 2.5, 0, 0, 0, 0, 'ada', '{"models":["demo"],"max_lines":7}', 0, true);
INSERT INTO public.files VALUES (1, 'in-b', 'anna', 'in.jsonl', 'batch', 100, 1800000000, NULL, 'processed');
INSERT INTO public.files VALUES (2, 'free', 'ben', 'ü.jsonl', 'batch', 5, 1800000000, 1800000009, 'processed');
INSERT INTO public.finished VALUES ('b', 1);
INSERT INTO public.finished VALUES ('b', 3);
INSERT INTO public.owner VALUES (1795851855);
INSERT INTO public.saturate_version VALUES (7);
SELECT pg_catalog.setval('public.batches_number_seq', 2, true);
SELECT pg_catalog.setval('public.files_number_seq', 2, true);
ALTER TABLE ONLY public.batches
    ADD CONSTRAINT batches_id_key UNIQUE (id);
ALTER TABLE ONLY public.batches
    ADD CONSTRAINT batches_pkey PRIMARY KEY (number);
ALTER TABLE ONLY public.capacity
    ADD CONSTRAINT capacity_pkey PRIMARY KEY (model, hour);
ALTER TABLE ONLY public.contents_without_file
    ADD CONSTRAINT contents_without_file_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.files
    ADD CONSTRAINT files_id_key UNIQUE (id);
ALTER TABLE ONLY public.files
    ADD CONSTRAINT files_pkey PRIMARY KEY (number);
ALTER TABLE ONLY public.finished
    ADD CONSTRAINT finished_pkey PRIMARY KEY (batch, line);
CREATE INDEX batches_by_expiry ON public.batches USING btree (expires_at);
CREATE INDEX batches_by_input ON public.batches USING btree (input_file);
CREATE INDEX batches_by_state ON public.batches USING btree (state);
CREATE INDEX batches_of_tenant ON public.batches USING btree (tenant, number);
CREATE INDEX files_by_expiry ON public.files USING btree (expires_at);
CREATE INDEX files_of_tenant ON public.files USING btree (tenant, number);
