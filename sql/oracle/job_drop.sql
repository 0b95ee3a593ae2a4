-- Stops and drops the job. For SQL*Plus or SQLcl, as its owner. May be run again at any time.
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
