-- Least-privilege roles on the tables, the view and the package. For SQL*Plus or SQLcl, as the owner of the tables, who
-- needs CREATE ROLE. May be run again at any time, and again after the package was installed.
WHENEVER SQLERROR EXIT FAILURE ROLLBACK
SET DEFINE OFF
SET SQLBLANKLINES ON

DECLARE
  PROCEDURE make_role(p_name IN VARCHAR2) IS
  BEGIN
    EXECUTE IMMEDIATE 'CREATE ROLE ' || p_name;
  EXCEPTION
    WHEN OTHERS THEN
      IF SQLCODE <> -1921 THEN  -- the role is there
        RAISE;
      END IF;
  END make_role;
BEGIN
  make_role('llama_ckpt_reader');
  make_role('llama_ckpt_writer');
  make_role('llama_ckpt_collector');
END;
/

-- The reader looks. READ, not SELECT, which would let it lock rows.
GRANT READ ON llama_ckpt_schema TO llama_ckpt_reader;
GRANT READ ON registry_info TO llama_ckpt_reader;
GRANT READ ON registry_lease TO llama_ckpt_reader;
GRANT READ ON llama_model TO llama_ckpt_reader;
GRANT READ ON llama_checkpoint_meta TO llama_ckpt_reader;
GRANT READ ON checkpoint_prefix TO llama_ckpt_reader;
GRANT READ ON save_claim TO llama_ckpt_reader;
GRANT READ ON gc_run TO llama_ckpt_reader;
GRANT READ ON gc_run_item TO llama_ckpt_reader;
GRANT READ ON ghost_seen TO llama_ckpt_reader;
GRANT READ ON gc_schedule TO llama_ckpt_reader;
GRANT READ ON usage_day TO llama_ckpt_reader;
GRANT READ ON llama_checkpoint_v TO llama_ckpt_reader;

-- The writer saves, restores, pins and removes: it marks rows STALE, but deletes none.
GRANT SELECT ON llama_ckpt_schema TO llama_ckpt_writer;
GRANT SELECT ON registry_info TO llama_ckpt_writer;
GRANT SELECT ON registry_lease TO llama_ckpt_writer;
GRANT SELECT, INSERT ON llama_model TO llama_ckpt_writer;
GRANT SELECT, INSERT, UPDATE ON llama_checkpoint_meta TO llama_ckpt_writer;
GRANT SELECT, INSERT, DELETE ON checkpoint_prefix TO llama_ckpt_writer;
GRANT SELECT, INSERT, UPDATE, DELETE ON save_claim TO llama_ckpt_writer;
GRANT SELECT ON gc_run TO llama_ckpt_writer;
GRANT SELECT ON gc_run_item TO llama_ckpt_writer;
GRANT SELECT ON ghost_seen TO llama_ckpt_writer;
GRANT SELECT ON gc_schedule TO llama_ckpt_writer;
GRANT SELECT, INSERT, UPDATE ON usage_day TO llama_ckpt_writer;
GRANT SELECT ON llama_checkpoint_v TO llama_ckpt_writer;

-- The collector prunes and frees: it marks and deletes rows, but adds no checkpoint.
GRANT SELECT ON llama_ckpt_schema TO llama_ckpt_collector;
GRANT SELECT ON registry_info TO llama_ckpt_collector;
GRANT SELECT, UPDATE ON registry_lease TO llama_ckpt_collector;
GRANT SELECT ON llama_model TO llama_ckpt_collector;
GRANT SELECT, UPDATE, DELETE ON llama_checkpoint_meta TO llama_ckpt_collector;
GRANT SELECT, DELETE ON checkpoint_prefix TO llama_ckpt_collector;
GRANT SELECT, INSERT, UPDATE, DELETE ON save_claim TO llama_ckpt_collector;
GRANT SELECT, INSERT, UPDATE, DELETE ON ghost_seen TO llama_ckpt_collector;
GRANT SELECT, INSERT, UPDATE, DELETE ON gc_schedule TO llama_ckpt_collector;
GRANT SELECT ON usage_day TO llama_ckpt_collector;
GRANT SELECT, INSERT, UPDATE, DELETE ON gc_run TO llama_ckpt_collector;
GRANT SELECT, INSERT ON gc_run_item TO llama_ckpt_collector;
GRANT SELECT ON llama_checkpoint_v TO llama_ckpt_collector;

-- The package acts with its owner's rights, so only who may add rows may call it. The job runs as the owner.
BEGIN
  EXECUTE IMMEDIATE 'GRANT EXECUTE ON llama_checkpoint TO llama_ckpt_writer';
EXCEPTION
  WHEN OTHERS THEN
    IF SQLCODE NOT IN (-4042, -942) THEN  -- the package, which is optional, is not installed
      RAISE;
    END IF;
END;
/
