-- Mutations of sessions with a database role run over connections of the question role, which may
-- read nothing itself. The position that a mutation is answered with names the log, so that role is
-- given EXECUTE on log_id() and no right on what it reads.
alter function headwater.log_id() security definer;
