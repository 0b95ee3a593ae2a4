-- Removes EVERYTHING from the schema: job, functions, view, tables with all their rows, and the roles where no other database
-- needs them. Not the files of the store. As the owner of the tables, their schema first in search_path:
-- psql -v ON_ERROR_STOP=1 --single-transaction -f. May be run again at any time.
DO $$
BEGIN
  IF to_regprocedure('llama_job_drop()') IS NOT NULL THEN
    PERFORM llama_job_drop();
  END IF;
END
$$;

DROP FUNCTION IF EXISTS llama_job_create;
DROP FUNCTION IF EXISTS llama_job_drop;
DROP FUNCTION IF EXISTS llama_job_status;
DROP PROCEDURE IF EXISTS llama_sweep;
DROP FUNCTION IF EXISTS llama_mark_stale;
DROP FUNCTION IF EXISTS llama_save_checkpoint;
DROP FUNCTION IF EXISTS llama_mark_descendants;
DROP FUNCTION IF EXISTS llama_active_key;
DROP FUNCTION IF EXISTS llama_now_us;
DROP VIEW IF EXISTS llama_checkpoint_v;
DROP TABLE IF EXISTS checkpoint_prefix;
DROP TABLE IF EXISTS ghost_seen;
DROP TABLE IF EXISTS gc_schedule;
DROP TABLE IF EXISTS usage_day;
DROP TABLE IF EXISTS save_claim;
DROP TABLE IF EXISTS gc_run_item;
DROP TABLE IF EXISTS gc_run;
DROP TABLE IF EXISTS llama_checkpoint_meta;
DROP TABLE IF EXISTS llama_model;
DROP TABLE IF EXISTS registry_lease;
DROP TABLE IF EXISTS registry_info;
DROP TABLE IF EXISTS llama_ckpt_schema;

DO $$
DECLARE
  v_role text;
BEGIN
  FOR v_role IN
    SELECT rolname FROM pg_roles WHERE rolname IN ('llama_ckpt_reader', 'llama_ckpt_writer', 'llama_ckpt_collector')
  LOOP
    EXECUTE format('REVOKE USAGE ON SCHEMA %I FROM %I', current_schema(), v_role);
    BEGIN
      EXECUTE format('DROP ROLE %I', v_role);
    EXCEPTION
      WHEN dependent_objects_still_exist THEN
        RAISE NOTICE 'role % is kept: another database or schema of this cluster needs it', v_role;
      WHEN undefined_object THEN NULL;  -- another dropped it at this moment
    END;
  END LOOP;
END
$$;
