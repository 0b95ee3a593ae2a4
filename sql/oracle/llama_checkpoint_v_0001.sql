-- What people look at: hex hashes, readable times, sizes. Made by migration 0001; frozen with it.
CREATE VIEW llama_checkpoint_v AS
SELECT c.ckpt_no,
       c.id,
       c.model_name,
       c.status,
       c.stale_reason,
       LOWER(RAWTOHEX(c.input_hash)) AS input_sha256,
       LOWER(RAWTOHEX(c.fingerprint)) AS fingerprint,
       c.n_tokens,
       c.memory_kind,
       c.file_path,
       c.file_size,
       ROUND(c.file_size / 1048576, 2) AS file_mib,
       c.hit_count,
       c.prefill_ms,
       c.pinned,
       c.label,
       TIMESTAMP '1970-01-01 00:00:00' + NUMTODSINTERVAL(c.created_us / 1000000, 'SECOND') AS created_at_utc,
       TIMESTAMP '1970-01-01 00:00:00' + NUMTODSINTERVAL(c.last_used_us / 1000000, 'SECOND') AS last_used_at_utc,
       TIMESTAMP '1970-01-01 00:00:00' + NUMTODSINTERVAL(c.stale_us / 1000000, 'SECOND') AS stale_at_utc,
       TIMESTAMP '1970-01-01 00:00:00' + NUMTODSINTERVAL(c.verified_us / 1000000, 'SECOND') AS verified_at_utc
  FROM llama_checkpoint_meta c
