-- Package llama_checkpoint: save and prune in PL/SQL. Optional: the program never calls it.
-- For SQL*Plus or SQLcl, as the owner of the tables. May be run again at any time.
-- A row that save_checkpoint makes is the row that the program makes for the same values.
WHENEVER SQLERROR EXIT FAILURE ROLLBACK
SET DEFINE OFF
SET SQLBLANKLINES ON

CREATE OR REPLACE PACKAGE llama_checkpoint AUTHID DEFINER AS
  -- Raised where a value cannot be a checkpoint's, the parent is ACTIVE no more, or too many save one input at once.
  c_bad_value  CONSTANT PLS_INTEGER := -20701;
  c_no_parent  CONSTANT PLS_INTEGER := -20702;
  c_too_many   CONSTANT PLS_INTEGER := -20703;

  -- Whole microseconds since 1970-01-01 UTC by the database's clock.
  FUNCTION now_us RETURN NUMBER;

  -- The key that at most one ACTIVE row may hold: SHA-256 of fingerprint and input hash, one behind the other.
  FUNCTION active_key_of(
    p_fingerprint IN RAW,
    p_input_hash  IN RAW)
    RETURN RAW;

  -- Adds an ACTIVE row. If one is ACTIVE for this fingerprint and input, it is made STALE ('superseded') with all
  -- deltas that need it, and its id comes back in p_replaced_id. The file must be whole and in its place before.
  -- The caller adds the rows of checkpoint_prefix and commits; when this raises, the caller rolls back.
  PROCEDURE save_checkpoint(
    p_id            IN  VARCHAR2,
    p_model_name    IN  VARCHAR2,
    p_fingerprint   IN  RAW,
    p_input_hash    IN  RAW,
    p_tokens_hash   IN  RAW,
    p_n_tokens      IN  NUMBER,
    p_memory_kind   IN  VARCHAR2,
    p_file_path     IN  VARCHAR2,
    p_file_size     IN  NUMBER,
    p_payload_crc32 IN  NUMBER,
    p_prefill_ms    IN  NUMBER DEFAULT NULL,
    p_expires_in_s  IN  NUMBER DEFAULT NULL,
    p_label         IN  VARCHAR2 DEFAULT NULL,
    p_start_token   IN  NUMBER DEFAULT 0,
    p_parent_no     IN  NUMBER DEFAULT NULL,
    p_extends_no    IN  NUMBER DEFAULT NULL,
    p_extended_by_no IN NUMBER DEFAULT NULL,
    p_ckpt_no       OUT NUMBER,
    p_replaced_id   OUT VARCHAR2);

  -- Makes STALE what was saved more than p_max_age_s ago, unused for more than p_max_idle_s (NULL: without limit), or is
  -- past its own expiry. Never a row that is pinned, leased, locked or needed by an ACTIVE delta: deltas go first.
  -- Commits after each batch.
  PROCEDURE mark_stale(
    p_max_age_s  IN  NUMBER DEFAULT NULL,
    p_max_idle_s IN  NUMBER DEFAULT NULL,
    p_batch      IN  PLS_INTEGER DEFAULT 1000,
    p_marked     OUT NUMBER);

  -- What the scheduler calls: mark_stale, recorded as a run in gc_run. Commits.
  PROCEDURE sweep(
    p_max_age_s  IN NUMBER DEFAULT NULL,
    p_max_idle_s IN NUMBER DEFAULT NULL,
    p_batch      IN PLS_INTEGER DEFAULT 1000);
END llama_checkpoint;
/

CREATE OR REPLACE PACKAGE BODY llama_checkpoint AS
  -- Each of those that save one input at once can get in before another only once.
  c_max_tries CONSTANT PLS_INTEGER := 20;

  TYPE t_numbers IS TABLE OF NUMBER;

  FUNCTION now_us RETURN NUMBER IS
    l_since INTERVAL DAY(9) TO SECOND(6);
  BEGIN
    l_since := SYS_EXTRACT_UTC(SYSTIMESTAMP) - TIMESTAMP '1970-01-01 00:00:00';
    RETURN EXTRACT(DAY FROM l_since) * 86400000000
         + EXTRACT(HOUR FROM l_since) * 3600000000
         + EXTRACT(MINUTE FROM l_since) * 60000000
         + ROUND(EXTRACT(SECOND FROM l_since) * 1000000);
  END now_us;

  FUNCTION active_key_of(
    p_fingerprint IN RAW,
    p_input_hash  IN RAW)
    RETURN RAW
  IS
    l_key RAW(32);
  BEGIN
    -- STANDARD_HASH is SQL only, and needs no grant. RAW || RAW would be joined as hex text and hashed as such:
    -- hence the explicit way there and back.
    SELECT STANDARD_HASH(HEXTORAW(RAWTOHEX(p_fingerprint) || RAWTOHEX(p_input_hash)), 'SHA256')
      INTO l_key
      FROM dual;
    RETURN l_key;
  END active_key_of;

  PROCEDURE require_digest(
    p_name  IN VARCHAR2,
    p_value IN RAW)
  IS
  BEGIN
    IF p_value IS NULL OR LENGTH(RAWTOHEX(p_value)) <> 64 THEN
      raise_application_error(c_bad_value, 'llama_checkpoint: ' || p_name || ' must have 32 bytes');
    END IF;
  END require_digest;

  -- Takes the links of a row that went STALE, and the deltas that need it along, level by level: each statement sees
  -- what was committed before it, so a delta that was added meanwhile is taken too.
  PROCEDURE mark_descendants(p_ckpt_no IN NUMBER) IS
    l_level    t_numbers := t_numbers(p_ckpt_no);
    l_children t_numbers;
    l_now      NUMBER := now_us;
  BEGIN
    WHILE l_level.COUNT > 0 LOOP
      FORALL i IN 1 .. l_level.COUNT
        DELETE FROM checkpoint_prefix
         WHERE ckpt_no = l_level(i);
      FORALL i IN 1 .. l_level.COUNT
        UPDATE llama_checkpoint_meta
           SET status = 'STALE',
               active_key = NULL,
               stale_reason = 'superseded',
               stale_us = l_now
         WHERE parent_no = l_level(i)
           AND status = 'ACTIVE'
        RETURNING ckpt_no BULK COLLECT INTO l_children;
      l_level := l_children;
    END LOOP;
  END mark_descendants;

  -- An ACTIVE delta's parent is ACTIVE. The change holds the row until the caller commits, and tells whoever planned to
  -- prune it that it was used.
  PROCEDURE hold_parent(p_parent_no IN NUMBER) IS
    l_now NUMBER := now_us;
  BEGIN
    UPDATE llama_checkpoint_meta
       SET last_used_us = GREATEST(l_now, last_used_us + 1)
     WHERE ckpt_no = p_parent_no
       AND status = 'ACTIVE';
    IF SQL%ROWCOUNT = 0 THEN
      raise_application_error(c_no_parent, 'llama_checkpoint: no ACTIVE parent ' || TO_CHAR(p_parent_no));
    END IF;
  END hold_parent;

  PROCEDURE save_checkpoint(
    p_id            IN  VARCHAR2,
    p_model_name    IN  VARCHAR2,
    p_fingerprint   IN  RAW,
    p_input_hash    IN  RAW,
    p_tokens_hash   IN  RAW,
    p_n_tokens      IN  NUMBER,
    p_memory_kind   IN  VARCHAR2,
    p_file_path     IN  VARCHAR2,
    p_file_size     IN  NUMBER,
    p_payload_crc32 IN  NUMBER,
    p_prefill_ms    IN  NUMBER DEFAULT NULL,
    p_expires_in_s  IN  NUMBER DEFAULT NULL,
    p_label         IN  VARCHAR2 DEFAULT NULL,
    p_start_token   IN  NUMBER DEFAULT 0,
    p_parent_no     IN  NUMBER DEFAULT NULL,
    p_extends_no    IN  NUMBER DEFAULT NULL,
    p_extended_by_no IN NUMBER DEFAULT NULL,
    p_ckpt_no       OUT NUMBER,
    p_replaced_id   OUT VARCHAR2)
  IS
    l_key         RAW(32);
    l_now         NUMBER;
    l_taken       PLS_INTEGER;
    l_replaced_no NUMBER;
  BEGIN
    require_digest('p_fingerprint', p_fingerprint);
    require_digest('p_input_hash', p_input_hash);
    require_digest('p_tokens_hash', p_tokens_hash);
    l_key := active_key_of(p_fingerprint, p_input_hash);
    p_replaced_id := NULL;
    FOR l_try IN 1 .. c_max_tries LOOP
      IF p_parent_no IS NOT NULL THEN
        hold_parent(p_parent_no);
      END IF;
      BEGIN
        l_now := now_us;
        INSERT INTO llama_checkpoint_meta
          (id, model_name, input_hash, file_path, status, active_key, fingerprint, tokens_hash, n_tokens, memory_kind,
           file_size, payload_crc32, created_us, last_used_us, hit_count, prefill_ms, expires_us, pinned, label,
           start_token, parent_no, extends_no)
        VALUES
          (p_id, p_model_name, p_input_hash, p_file_path, 'ACTIVE', l_key, p_fingerprint, p_tokens_hash, p_n_tokens,
           p_memory_kind, p_file_size, p_payload_crc32, l_now, l_now, 0, p_prefill_ms,
           l_now + TRUNC(p_expires_in_s * 1000000), 0, p_label, p_start_token, p_parent_no, p_extends_no)
        RETURNING ckpt_no INTO p_ckpt_no;
        -- A longer row that went on from the same one goes on from this one now.
        UPDATE llama_checkpoint_meta
           SET extends_no = p_ckpt_no
         WHERE ckpt_no = p_extended_by_no AND COALESCE(extends_no, 0) = COALESCE(p_extends_no, 0);
        RETURN;
      EXCEPTION
        WHEN DUP_VAL_ON_INDEX THEN
          -- The failed INSERT alone is undone already: no savepoint. What clashed? Not an id or path of our own, please.
          SELECT COUNT(*)
            INTO l_taken
            FROM llama_checkpoint_meta
           WHERE id = p_id
              OR file_path = p_file_path;
          IF l_taken > 0 THEN
            RAISE;
          END IF;
          UPDATE llama_checkpoint_meta
             SET status = 'STALE',
                 active_key = NULL,
                 stale_reason = 'superseded',
                 stale_us = l_now
           WHERE active_key = l_key
          RETURNING ckpt_no, id INTO l_replaced_no, p_replaced_id;
          -- No row: another made it STALE first, and its key is free or taken anew. Either way: again.
          IF SQL%ROWCOUNT > 0 THEN
            mark_descendants(l_replaced_no);
          END IF;
      END;
    END LOOP;
    raise_application_error(c_too_many, 'llama_checkpoint: too many save this input at once');
  END save_checkpoint;

  PROCEDURE mark_stale(
    p_max_age_s  IN  NUMBER DEFAULT NULL,
    p_max_idle_s IN  NUMBER DEFAULT NULL,
    p_batch      IN  PLS_INTEGER DEFAULT 1000,
    p_marked     OUT NUMBER)
  IS
    l_now          NUMBER := now_us;
    l_saved_before NUMBER := l_now - p_max_age_s * 1000000;
    l_used_before  NUMBER := l_now - p_max_idle_s * 1000000;
    l_due          t_numbers;
    l_marked       t_numbers;
    -- No row limit: rows lock as they are fetched, and LIMIT counts those that were not skipped.
    CURSOR c_due IS
      SELECT m.ckpt_no
        FROM llama_checkpoint_meta m
       WHERE m.status = 'ACTIVE'
         AND m.pinned = 0
         AND (m.lease_until_us IS NULL OR m.lease_until_us <= l_now)
         AND (m.expires_us <= l_now OR m.created_us < l_saved_before OR m.last_used_us < l_used_before)
         AND NOT EXISTS (SELECT d.ckpt_no FROM llama_checkpoint_meta d WHERE d.parent_no = m.ckpt_no AND d.status = 'ACTIVE')
         FOR UPDATE OF m.status SKIP LOCKED;
  BEGIN
    IF p_batch IS NULL OR p_batch < 1 THEN
      raise_application_error(c_bad_value, 'llama_checkpoint: p_batch must be at least 1');
    END IF;
    p_marked := 0;
    LOOP
      OPEN c_due;
      FETCH c_due BULK COLLECT INTO l_due LIMIT p_batch;
      CLOSE c_due;
      EXIT WHEN l_due.COUNT = 0;
      -- Asked again of the locked rows: between the cursor's view and the lock a row may have been used, pinned or
      -- made a parent.
      FORALL i IN 1 .. l_due.COUNT
        UPDATE llama_checkpoint_meta m
           SET m.status = 'STALE',
               m.active_key = NULL,
               m.stale_reason = CASE WHEN m.expires_us <= l_now THEN 'expired' ELSE 'evicted' END,
               m.stale_us = l_now
         WHERE m.ckpt_no = l_due(i)
           AND m.status = 'ACTIVE'
           AND m.pinned = 0
           AND (m.lease_until_us IS NULL OR m.lease_until_us <= l_now)
           AND (m.expires_us <= l_now OR m.created_us < l_saved_before OR m.last_used_us < l_used_before)
           AND NOT EXISTS (SELECT d.ckpt_no FROM llama_checkpoint_meta d WHERE d.parent_no = m.ckpt_no AND d.status = 'ACTIVE')
        RETURNING m.ckpt_no BULK COLLECT INTO l_marked;
      -- In the same transaction: a link always leads to an ACTIVE row.
      FORALL i IN 1 .. l_marked.COUNT
        DELETE FROM checkpoint_prefix
         WHERE ckpt_no = l_marked(i);
      p_marked := p_marked + l_marked.COUNT;
      COMMIT;
    END LOOP;
    COMMIT;
  END mark_stale;

  PROCEDURE sweep(
    p_max_age_s  IN NUMBER DEFAULT NULL,
    p_max_idle_s IN NUMBER DEFAULT NULL,
    p_batch      IN PLS_INTEGER DEFAULT 1000)
  IS
    l_host   VARCHAR2(120 CHAR);
    l_now    NUMBER := now_us;
    l_run_no NUMBER;
    l_marked NUMBER;
  BEGIN
    l_host := SUBSTR('oracle:' || SYS_CONTEXT('USERENV', 'SERVER_HOST') || ':' || SYS_CONTEXT('USERENV', 'SID'), 1, 120);
    INSERT INTO gc_run
      (kind, host, started_us, n_items, n_failed, freed_bytes)
    VALUES
      ('prune', l_host, l_now, 0, 0, 0)
    RETURNING run_no INTO l_run_no;
    COMMIT;
    mark_stale(p_max_age_s => p_max_age_s, p_max_idle_s => p_max_idle_s, p_batch => p_batch, p_marked => l_marked);
    l_now := now_us;
    UPDATE gc_run
       SET ended_us = l_now,
           n_items = l_marked
     WHERE run_no = l_run_no;
    COMMIT;
  END sweep;
END llama_checkpoint;
/

SHOW ERRORS PACKAGE BODY llama_checkpoint

DECLARE
  l_errors PLS_INTEGER;
BEGIN
  SELECT COUNT(*)
    INTO l_errors
    FROM user_errors
   WHERE name = 'LLAMA_CHECKPOINT'
     AND attribute = 'ERROR';
  IF l_errors > 0 THEN
    raise_application_error(-20704, 'LLAMA_CHECKPOINT did not compile: see USER_ERRORS');
  END IF;
END;
/

-- The key must be the program's, byte for byte: SHA-256 of 64 zero bytes.
DECLARE
  l_zeros RAW(32) := HEXTORAW(RPAD('0', 64, '0'));
BEGIN
  IF RAWTOHEX(llama_checkpoint.active_key_of(l_zeros, l_zeros))
     <> 'F5A5FD42D16A20302798EF6ED309979B43003D2320D9F0E8EA9831A92759FB4B' THEN
    raise_application_error(-20705, 'LLAMA_CHECKPOINT makes other keys than the program: do not use it');
  END IF;
END;
/
