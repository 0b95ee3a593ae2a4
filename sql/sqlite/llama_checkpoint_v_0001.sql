-- What people look at: hex hashes, readable times, sizes. Made by migration 0001; frozen with it.
CREATE VIEW llama_checkpoint_v AS
SELECT c.ckpt_no,
       c.id,
       c.model_name,
       c.status,
       c.stale_reason,
       lower(hex(c.input_hash)) AS input_sha256,
       lower(hex(c.fingerprint)) AS fingerprint,
       c.n_tokens,
       c.memory_kind,
       c.file_path,
       c.file_size,
       round(c.file_size / 1048576.0, 2) AS file_mib,
       c.hit_count,
       c.prefill_ms,
       c.pinned,
       c.label,
       datetime(c.created_us / 1000000, 'unixepoch') AS created_at_utc,
       datetime(c.last_used_us / 1000000, 'unixepoch') AS last_used_at_utc,
       datetime(c.stale_us / 1000000, 'unixepoch') AS stale_at_utc,
       datetime(c.verified_us / 1000000, 'unixepoch') AS verified_at_utc
  FROM llama_checkpoint_meta c
