-- What the job does, did last, and marked. For SQL*Plus or SQLcl, as its owner. Reads only.
WHENEVER SQLERROR EXIT FAILURE ROLLBACK
SET DEFINE OFF
SET SQLBLANKLINES ON
SET LINESIZE 200
COLUMN host FORMAT A40
COLUMN additional_info FORMAT A80

SELECT job_name, enabled, state, run_count, failure_count, last_start_date, next_run_date
  FROM user_scheduler_jobs
 WHERE job_name = 'LLAMA_CKPT_SWEEP';

SELECT log_date, status, run_duration, additional_info
  FROM user_scheduler_job_run_details
 WHERE job_name = 'LLAMA_CKPT_SWEEP'
 ORDER BY log_date DESC
 FETCH FIRST 10 ROWS ONLY;

SELECT run_no, host, TIMESTAMP '1970-01-01 00:00:00' + NUMTODSINTERVAL(started_us / 1000000, 'SECOND') AS started_at_utc,
       ended_us - started_us AS run_us, n_items
  FROM gc_run
 WHERE kind = 'prune'
 ORDER BY run_no DESC
 FETCH FIRST 10 ROWS ONLY;
