"""Who may execute which function of the schema `headwater`: each is in exactly one class.

Every install and upgrade grants and revokes by these classes. A function that is in none of them
is treated as the gateway's, and a test fails for it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Class: TypeAlias = Literal["public", "reader", "capture", "mutation", "gateway"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CLASSES: dict[Class, frozenset[str]] = {
    # Every role. `signal` checks its caller itself. PostgreSQL gives the triggers to new
    # partitions, whose owner must be allowed to use them; on other tables they do nothing.
    "public": _names("signal capture_row note_move pass_row say_actor set_actor"),
    # Roles that follow the log and look at the state of capture (`tail`, `status`, `doctor`). The
    # page docs/howto/existing-database.md grants exactly these.
    "reader": _names(
        """
        changed_columns columns_mark describe find_table find_table_in fingerprint home key_of label
        lock_class lock_holders log_id may_repeat_rows members_of operators own_triggers schemas_of
        session_path shape_id slot_at triggers_mark
        """
    ),
    # Roles that enable tables, whose capture functions call them. They run with the rights of the
    # role that calls them, so they give it nothing that it does not have.
    "capture": _names(
        """
        actor add_doubt add_since as_root begin_row capture_source capture_statement
        capture_truncate capture_versions chain chain_keys check_capturable client_entry
        disable_reactivity disable_table enable_reactivity enable_table fire_always fits
        format_settings fresh_statement has_logged_reset image install_capture is_altered_since
        is_in_step is_noted is_reset_due is_watched key_condition known_state log_pending
        log_reset log_reset_due logged_since make_capture make_mark mark_hash mark_source may_note
        may_notify meaning moves nesting note_version notice_field notify observe only_image
        open_entries own_entry parts_of present_image put_in_order readers_sleep register_shape
        remember remove_capture same_columns set_entries set_trigger settle settle_row since_of
        slot_condition strike_noted strike_source swap_formats sync_table sync_tables take_back
        take_turn transaction_mark trusts upsert_source add_wal_member check_wal
        is_in_step_with_triggers is_in_step_with_wal is_watched_by_triggers make_wal_publication
        make_wal_slot drop_wal_slot is_published misses_changes unpublish
        remove_captures remove_wal_member sync_with_triggers sync_with_wal use_wal_slot wal_kind
        wal_root wal_publication wal_preparation is_wal_captured
        """
    ),
    # Also the question role, which is granted them by name. A caller needs the key of a request,
    # which cannot be guessed.
    "mutation": _names("begin_request store_request"),
    # The owner of the schema only. Those that run with its rights also check who calls them.
    "gateway": _names(
        """
        adopt adopt_by_triggers adopt_sources append_changes check_gateway drop_wal_slots
        end_wal_capture expect_rows guard_mirror is_activity_looked_at is_over issue_ticket
        looks_at_activity may_signal new_secret publish_once redeem_ticket remember_trimmed
        rename_log save_position set_retention trim_log trim_requests trim_source_transactions
        trim_tickets trim_user_requests wal_relation write_activity
        """
    ),
}

_CLASS_OF = ", ".join(
    f"('{name}', '{kind}')" for kind, names in CLASSES.items() for name in sorted(names)
)

# Which roles are readers, and which enable tables, is what they could do before: a reader may call
# log_id; a role that enables tables may also write to the log, or owns a capture function, or has a
# member that does. Roles that could call every function were given that by a grant on all of them.
RIGHTS = f"""
do $$
declare
  readers oid[];
  capturers oid[];
  granted_all oid[];
  entitled oid[];
  function record;
  other oid;
begin
  select array_agg(distinct a.grantee) into readers
  from pg_proc p, aclexplode(p.proacl) a
  where p.oid = to_regprocedure('headwater.log_id()') and a.grantee not in (0, p.proowner);
  select array_agg(distinct a.grantee) into capturers
  from pg_proc p, aclexplode(p.proacl) a
  where p.oid = to_regprocedure('headwater.fits(oid, oid, bigint)')
    and a.grantee not in (0, p.proowner)
    and (has_table_privilege(a.grantee, to_regclass('headwater.log'), 'insert')
         or exists (select from pg_proc c where c.pronamespace = 'headwater'::regnamespace
                    and c.proname ~ '^(capture|mark)_[0-9]'
                    and pg_has_role(c.proowner, a.grantee, 'member')));
  select array_agg(distinct a.grantee) into granted_all
  from pg_proc p, aclexplode(p.proacl) a
  where p.pronamespace = 'headwater'::regnamespace and p.proname = 'issue_ticket'
    and a.grantee not in (0, p.proowner);
  for function in
    select p.oid::regprocedure as name, p.proowner as owner, p.proacl as acl,
           coalesce(c.class, 'gateway') as class
    from pg_proc p left join (values {_CLASS_OF}) as c (name, class) on c.name = p.proname
    where p.pronamespace = 'headwater'::regnamespace and pg_has_role(p.proowner, 'usage')
      and p.proname !~ '^(capture|mark)_[0-9]'
  loop
    if function.class = 'public' then
      execute format('grant execute on function %s to public', function.name);
      continue;
    end if;
    execute format('revoke all on function %s from public cascade', function.name);
    entitled := case function.class
      when 'reader' then readers || capturers when 'capture' then capturers else '{{}}' end;
    for other in
      select distinct a.grantee from aclexplode(function.acl) a
      where a.grantee not in (0, function.owner) and a.grantee <> all (coalesce(entitled, '{{}}'))
        and (function.class <> 'mutation' or a.grantee = any (granted_all))
    loop
      execute format(
        'revoke all on function %s from %s cascade', function.name, other::regrole);
    end loop;
    foreach other in array coalesce(entitled, '{{}}') loop
      execute format('grant execute on function %s to %s', function.name, other::regrole);
    end loop;
  end loop;
end $$
"""

# Other roles that may execute what is for the owner of the schema alone.
OTHERS = """
    select distinct case when a.grantee = 0 then 'every role' else a.grantee::regrole::text end,
           p.proname::text
    from pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
    where p.pronamespace = 'headwater'::regnamespace and p.proname::text = any(%s)
      and a.privilege_type = 'EXECUTE' and a.grantee <> p.proowner
    order by 1, 2
"""
