-- An hourly job that marks rows STALE. For SQL*Plus or SQLcl, as the owner of the package, who needs CREATE JOB.
-- May be run again: it replaces the job. The job only marks rows: files are freed by `llama-ckpt gc` on a host that sees the store.
WHENEVER SQLERROR EXIT FAILURE ROLLBACK
SET DEFINE OFF
SET SQLBLANKLINES ON

BEGIN
  DBMS_SCHEDULER.DROP_JOB(job_name => 'LLAMA_CKPT_SWEEP', force => TRUE);
EXCEPTION
  WHEN OTHERS THEN
    IF SQLCODE <> -27475 THEN  -- there is no such job
      RAISE;
    END IF;
END;
/

-- The policy: here what was unused for 30 days. p_max_age_s counts from the save; NULL is without limit.
BEGIN
  DBMS_SCHEDULER.CREATE_JOB(
    job_name        => 'LLAMA_CKPT_SWEEP',
    job_type        => 'PLSQL_BLOCK',
    job_action      => 'BEGIN llama_checkpoint.sweep(p_max_age_s => NULL, p_max_idle_s => 2592000); END;',
    start_date      => SYSTIMESTAMP,
    repeat_interval => 'FREQ=HOURLY;BYMINUTE=17;BYSECOND=0',
    enabled         => TRUE,
    auto_drop       => FALSE,
    comments        => 'llama-ckpt, marks idle, aged and expired checkpoints STALE');
END;
/
