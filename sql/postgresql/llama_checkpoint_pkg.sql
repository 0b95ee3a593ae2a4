-- Save and prune in PL/pgSQL. Optional: the program never calls these functions.
-- As the owner of the tables, with their schema first in search_path: psql -v ON_ERROR_STOP=1 --single-transaction -f.
-- May be run again at any time. The functions act with the caller's rights and find the tables by the caller's search_path.
-- A row that llama_save_checkpoint makes is the row that the program makes for the same values.

-- Whole microseconds since 1970-01-01 UTC by the database's clock.
CREATE OR REPLACE FUNCTION llama_now_us() RETURNS bigint
LANGUAGE sql VOLATILE AS $$
  SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)
$$;

-- The key that at most one ACTIVE row may hold: SHA-256 of fingerprint and input hash, one behind the other.
CREATE OR REPLACE FUNCTION llama_active_key(p_fingerprint bytea, p_input_hash bytea) RETURNS bytea
LANGUAGE sql IMMUTABLE STRICT AS $$
  SELECT sha256(p_fingerprint || p_input_hash)
$$;

-- Takes the links of rows that went STALE, and the deltas that need them along, level by level: each statement sees
-- what was committed before it, so a delta that was added meanwhile is taken too.
CREATE OR REPLACE FUNCTION llama_mark_descendants(p_ckpt_nos bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  v_level bigint[] := p_ckpt_nos;
BEGIN
  WHILE cardinality(v_level) > 0 LOOP
    DELETE FROM checkpoint_prefix WHERE ckpt_no = ANY (v_level);
    WITH marked AS (
      UPDATE llama_checkpoint_meta
         SET status = 'STALE', active_key = NULL, stale_reason = 'superseded', stale_us = llama_now_us()
       WHERE parent_no = ANY (v_level) AND status = 'ACTIVE'
      RETURNING ckpt_no
    )
    SELECT coalesce(array_agg(ckpt_no), '{}') INTO v_level FROM marked;
  END LOOP;
END
$$;

-- Adds an ACTIVE row. If one is ACTIVE for this fingerprint and input, it is made STALE ('superseded') with all deltas that
-- need it, and its id comes back in p_replaced_id. The file must be whole and in its place before.
-- The caller adds the rows of checkpoint_prefix and commits; when this raises, nothing of it is kept.
-- The function of earlier schemas, with fewer parameters, would stand beside this one: then no call is clear.
DROP FUNCTION IF EXISTS llama_save_checkpoint(
  text, text, bytea, bytea, bytea, integer, text, text, bigint, bigint, bigint, double precision, text, integer, bigint
);
CREATE OR REPLACE FUNCTION llama_save_checkpoint(
  p_id            text,
  p_model_name    text,
  p_fingerprint   bytea,
  p_input_hash    bytea,
  p_tokens_hash   bytea,
  p_n_tokens      integer,
  p_memory_kind   text,
  p_file_path     text,
  p_file_size     bigint,
  p_payload_crc32 bigint,
  p_prefill_ms    bigint DEFAULT NULL,
  p_expires_in_s  double precision DEFAULT NULL,
  p_label         text DEFAULT NULL,
  p_start_token   integer DEFAULT 0,
  p_parent_no     bigint DEFAULT NULL,
  p_extends_no    bigint DEFAULT NULL,
  p_extended_by_no bigint DEFAULT NULL,
  OUT p_ckpt_no     bigint,
  OUT p_replaced_id text
)
LANGUAGE plpgsql AS $$
DECLARE
  -- Each of those that save one input at once can get in before another only once.
  c_max_tries CONSTANT integer := 20;
  v_key         bytea := llama_active_key(p_fingerprint, p_input_hash);
  v_now         bigint;
  v_replaced_no bigint;
BEGIN
  IF (length(p_fingerprint) = 32 AND length(p_input_hash) = 32 AND length(p_tokens_hash) = 32) IS NOT TRUE THEN
    RAISE EXCEPTION 'llama_save_checkpoint: fingerprint, input hash and tokens hash must have 32 bytes'
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
  FOR v_try IN 1 .. c_max_tries LOOP
    v_now := llama_now_us();
    IF p_parent_no IS NOT NULL THEN
      -- An ACTIVE delta's parent is ACTIVE. The change holds the row until the caller commits, and tells whoever planned
      -- to prune it that it was used.
      UPDATE llama_checkpoint_meta
         SET last_used_us = GREATEST(v_now, last_used_us + 1)
       WHERE ckpt_no = p_parent_no AND status = 'ACTIVE';
      IF NOT FOUND THEN
        RAISE EXCEPTION 'llama_save_checkpoint: no ACTIVE parent %', p_parent_no USING ERRCODE = 'foreign_key_violation';
      END IF;
    END IF;
    BEGIN
      INSERT INTO llama_checkpoint_meta
        (id, model_name, input_hash, file_path, status, active_key, fingerprint, tokens_hash, n_tokens, memory_kind,
         file_size, payload_crc32, created_us, last_used_us, hit_count, prefill_ms, expires_us, pinned, label,
         start_token, parent_no, extends_no)
      VALUES
        -- An empty text is NULL here as it is on Oracle.
        (nullif(p_id, ''), nullif(p_model_name, ''), p_input_hash, nullif(p_file_path, ''), 'ACTIVE', v_key,
         p_fingerprint, p_tokens_hash, p_n_tokens, nullif(p_memory_kind, ''), p_file_size, p_payload_crc32, v_now, v_now,
         0, p_prefill_ms, v_now + CAST(trunc(p_expires_in_s * 1000000) AS bigint), 0, nullif(p_label, ''),
         p_start_token, p_parent_no, p_extends_no)
      RETURNING ckpt_no INTO p_ckpt_no;
      -- A longer row that went on from the same one goes on from this one now.
      UPDATE llama_checkpoint_meta
         SET extends_no = p_ckpt_no
       WHERE ckpt_no = p_extended_by_no AND COALESCE(extends_no, 0) = COALESCE(p_extends_no, 0);
      RETURN;
    EXCEPTION
      WHEN unique_violation THEN
        -- What clashed? With an id or a path that is taken, no other row can help.
        IF EXISTS (SELECT FROM llama_checkpoint_meta WHERE id = p_id OR file_path = p_file_path) THEN
          RAISE;
        END IF;
    END;
    UPDATE llama_checkpoint_meta
       SET status = 'STALE', active_key = NULL, stale_reason = 'superseded', stale_us = v_now
     WHERE active_key = v_key
    RETURNING ckpt_no, id INTO v_replaced_no, p_replaced_id;
    -- No row: another made it STALE first, and its key is free or taken anew. Either way: again.
    IF FOUND THEN
      PERFORM llama_mark_descendants(ARRAY[v_replaced_no]);
    END IF;
  END LOOP;
  RAISE EXCEPTION 'llama_save_checkpoint: too many save this input at once' USING ERRCODE = 'lock_not_available';
END
$$;

-- One batch: makes STALE at most p_batch rows that were saved more than p_max_age_s ago, unused for more than p_max_idle_s
-- (NULL: without limit), or are past their own expiry, and says how many. Never a row that is pinned, leased, locked or needed
-- by an ACTIVE delta: deltas go first, their parents with the next batch. The caller commits, and calls again until 0.
CREATE OR REPLACE FUNCTION llama_mark_stale(
  p_max_age_s  double precision DEFAULT NULL,
  p_max_idle_s double precision DEFAULT NULL,
  p_batch      integer DEFAULT 1000
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  v_now          bigint := llama_now_us();
  v_saved_before bigint := v_now - CAST(trunc(p_max_age_s * 1000000) AS bigint);
  v_used_before  bigint := v_now - CAST(trunc(p_max_idle_s * 1000000) AS bigint);
  v_due          bigint[];
  v_marked       bigint[];
BEGIN
  IF (p_batch >= 1) IS NOT TRUE THEN
    RAISE EXCEPTION 'llama_mark_stale: p_batch must be at least 1' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  SELECT coalesce(array_agg(due.ckpt_no), '{}')
    INTO v_due
    FROM (
      SELECT m.ckpt_no
        FROM llama_checkpoint_meta m
       WHERE m.status = 'ACTIVE'
         AND m.pinned = 0
         AND (m.lease_until_us IS NULL OR m.lease_until_us <= v_now)
         AND (m.expires_us <= v_now OR m.created_us < v_saved_before OR m.last_used_us < v_used_before)
         AND NOT EXISTS (SELECT FROM llama_checkpoint_meta d WHERE d.parent_no = m.ckpt_no AND d.status = 'ACTIVE')
       LIMIT p_batch
         FOR UPDATE OF m SKIP LOCKED
    ) due;
  -- Asked again of the locked rows: between the first look and the lock a row may have been made a parent.
  WITH marked AS (
    UPDATE llama_checkpoint_meta m
       SET status = 'STALE',
           active_key = NULL,
           stale_reason = CASE WHEN m.expires_us <= v_now THEN 'expired' ELSE 'evicted' END,
           stale_us = v_now
     WHERE m.ckpt_no = ANY (v_due)
       AND m.status = 'ACTIVE'
       AND m.pinned = 0
       AND (m.lease_until_us IS NULL OR m.lease_until_us <= v_now)
       AND (m.expires_us <= v_now OR m.created_us < v_saved_before OR m.last_used_us < v_used_before)
       AND NOT EXISTS (SELECT FROM llama_checkpoint_meta d WHERE d.parent_no = m.ckpt_no AND d.status = 'ACTIVE')
    RETURNING m.ckpt_no
  )
  SELECT coalesce(array_agg(marked.ckpt_no), '{}') INTO v_marked FROM marked;
  -- In the same transaction: a link always leads to an ACTIVE row.
  DELETE FROM checkpoint_prefix WHERE ckpt_no = ANY (v_marked);
  RETURN cardinality(v_marked);
END
$$;

-- llama_mark_stale until nothing is due, committed batch by batch and recorded as a run in gc_run. For a scheduler: CALL it
-- outside of a transaction.
CREATE OR REPLACE PROCEDURE llama_sweep(
  p_max_age_s  double precision DEFAULT NULL,
  p_max_idle_s double precision DEFAULT NULL,
  p_batch      integer DEFAULT 1000
)
LANGUAGE plpgsql AS $$
DECLARE
  v_run_no bigint;
  v_batch  bigint;
  v_marked bigint := 0;
BEGIN
  INSERT INTO gc_run (kind, host, started_us, n_items, n_failed, freed_bytes)
  VALUES ('prune', left('postgresql:' || current_database() || ':' || pg_backend_pid(), 120), llama_now_us(), 0, 0, 0)
  RETURNING run_no INTO v_run_no;
  COMMIT;
  LOOP
    v_batch := llama_mark_stale(p_max_age_s, p_max_idle_s, p_batch);
    v_marked := v_marked + v_batch;
    COMMIT;
    EXIT WHEN v_batch = 0;
  END LOOP;
  UPDATE gc_run SET ended_us = llama_now_us(), n_items = v_marked WHERE run_no = v_run_no;
  COMMIT;
END
$$;
