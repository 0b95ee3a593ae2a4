-- A job that marks rows STALE, where the extension pg_cron is installed in this database. As the role that the job shall run
-- as, with the schema of the tables first in its search_path. May be run again at any time. Then:
--   SELECT llama_job_create('17 * * * *', NULL, 2592000);   every hour, what was unused for 30 days; replaces the job
--   SELECT * FROM llama_job_status();                       what it does, did last, and how that ended
--   SELECT llama_job_drop();                                true when there was one
-- The job only marks rows: files are freed by `llama-ckpt gc` on a host that sees the store.
CREATE OR REPLACE FUNCTION llama_job_create(p_schedule text, p_max_age_s double precision, p_max_idle_s double precision) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
  IF to_regclass('cron.job') IS NULL THEN
    RAISE EXCEPTION 'llama_job_create: the extension pg_cron is not installed in database %', current_database()
      USING ERRCODE = 'undefined_object', HINT = 'See README.md for a job without it.';
  END IF;
  -- The name is a database's own: the jobs of all databases stand in one table.
  RETURN cron.schedule(
    'llama_ckpt_sweep_' || current_database(),
    p_schedule,
    format('CALL llama_sweep(%s, %s)', coalesce(p_max_age_s::text, 'NULL'), coalesce(p_max_idle_s::text, 'NULL'))
  );
END
$$;

CREATE OR REPLACE FUNCTION llama_job_drop() RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
  v_jobid bigint;
BEGIN
  IF to_regclass('cron.job') IS NULL THEN
    RETURN FALSE;
  END IF;
  SELECT jobid INTO v_jobid FROM cron.job WHERE jobname = 'llama_ckpt_sweep_' || current_database();
  IF v_jobid IS NULL THEN
    RETURN FALSE;
  END IF;
  RETURN cron.unschedule(v_jobid);
END
$$;

CREATE OR REPLACE FUNCTION llama_job_status()
RETURNS TABLE (schedule text, command text, active boolean, last_status text, last_message text, last_start timestamptz)
LANGUAGE plpgsql AS $$
BEGIN
  IF to_regclass('cron.job') IS NULL THEN
    RETURN;
  END IF;
  RETURN QUERY
    SELECT j.schedule, j.command, j.active, r.status, r.return_message, r.start_time
      FROM cron.job j
      LEFT JOIN LATERAL (
        SELECT d.status, d.return_message, d.start_time
          FROM cron.job_run_details d
         WHERE d.jobid = j.jobid
         ORDER BY d.start_time DESC
         LIMIT 1
      ) r ON TRUE
     WHERE j.jobname = 'llama_ckpt_sweep_' || current_database();
END
$$;
