-- Removes EVERYTHING from the schema: job, package, view, tables with all their rows, roles. Not the files of the store.
-- For SQL*Plus or SQLcl, as the owner of the tables, who needs DROP ANY ROLE or to have made the roles. May be run again at any time.
WHENEVER SQLERROR EXIT FAILURE ROLLBACK
SET DEFINE OFF
SET SQLBLANKLINES ON

DECLARE
  -- p_absent: the error that says there is nothing to drop.
  PROCEDURE drop_it(
    p_what   IN VARCHAR2,
    p_absent IN PLS_INTEGER)
  IS
  BEGIN
    EXECUTE IMMEDIATE 'DROP ' || p_what;
  EXCEPTION
    WHEN OTHERS THEN
      IF SQLCODE <> p_absent THEN
        RAISE;
      END IF;
  END drop_it;
BEGIN
  BEGIN
    DBMS_SCHEDULER.DROP_JOB(job_name => 'LLAMA_CKPT_SWEEP', force => TRUE);
  EXCEPTION
    WHEN OTHERS THEN
      IF SQLCODE <> -27475 THEN
        RAISE;
      END IF;
  END;
  drop_it('PACKAGE llama_checkpoint', -4043);
  drop_it('VIEW llama_checkpoint_v', -942);
  drop_it('TABLE checkpoint_prefix PURGE', -942);
  drop_it('TABLE ghost_seen PURGE', -942);
  drop_it('TABLE gc_schedule PURGE', -942);
  drop_it('TABLE usage_day PURGE', -942);
  drop_it('TABLE save_claim PURGE', -942);
  drop_it('TABLE gc_run_item PURGE', -942);
  drop_it('TABLE gc_run PURGE', -942);
  drop_it('TABLE llama_checkpoint_meta PURGE', -942);
  drop_it('TABLE llama_model PURGE', -942);
  drop_it('TABLE registry_lease PURGE', -942);
  drop_it('TABLE registry_info PURGE', -942);
  drop_it('TABLE llama_ckpt_schema PURGE', -942);
  drop_it('ROLE llama_ckpt_reader', -1919);
  drop_it('ROLE llama_ckpt_writer', -1919);
  drop_it('ROLE llama_ckpt_collector', -1919);
END;
/
