-- What people look at: hex hashes, readable times, sizes. Made by migration 0001; frozen with it.
CREATE VIEW llama_checkpoint_v AS
SELECT c.ckpt_no,
       c.id,
       c.model_name,
       c.status,
       c.stale_reason,
       encode(c.input_hash, 'hex') AS input_sha256,
       encode(c.fingerprint, 'hex') AS fingerprint,
       c.n_tokens,
       c.memory_kind,
       c.file_path,
       c.file_size,
       round(c.file_size / 1048576.0, 2) AS file_mib,
       c.hit_count,
       c.prefill_ms,
       c.pinned,
       c.label,
       to_timestamp(c.created_us / 1000000.0) AT TIME ZONE 'UTC' AS created_at_utc,
       to_timestamp(c.last_used_us / 1000000.0) AT TIME ZONE 'UTC' AS last_used_at_utc,
       to_timestamp(c.stale_us / 1000000.0) AT TIME ZONE 'UTC' AS stale_at_utc,
       to_timestamp(c.verified_us / 1000000.0) AT TIME ZONE 'UTC' AS verified_at_utc
  FROM llama_checkpoint_meta c
