"""Every statement of the kernel, each with a name. `$n` are asyncpg's parameters.

The one rule: no statement here locks the row of another run than the one that is claimed, and what nudges a run is
an INSERT into `signal`. Times are the server's; a lease is a random number drawn for each claim.
"""

from __future__ import annotations

# What is due, by id (a message named it) and by shard (the sweep; two halves so that each uses its partial index).
# `asked` is whether an unseen signal asks for the end. A parked run is due only for an unseen `destroy` or `resume`.

_DUE_BY_ID = """
WITH due AS (
    SELECT run.id, EXISTS (SELECT FROM signal WHERE run_id = $1 AND seen_at IS NULL AND kind = 'destroy') AS asked
    FROM run
    WHERE run.id = $1 AND finished_at IS NULL AND (lease_until IS NULL OR lease_until < now())
      AND CASE WHEN parked_at IS NULL
          THEN wake_at <= now()
               OR (not_before <= now() AND EXISTS (SELECT FROM signal WHERE run_id = $1 AND seen_at IS NULL))
          ELSE EXISTS (SELECT FROM signal WHERE run_id = $1 AND seen_at IS NULL AND kind IN ('destroy', 'resume'))
          END
)"""

_DUE_BY_SHARD = """
WITH candidate AS (
    (SELECT id FROM run
     WHERE shard = ANY ($1::smallint[]) AND finished_at IS NULL AND parked_at IS NULL AND wake_at <= now()
       AND (lease_until IS NULL OR lease_until < now())
     ORDER BY wake_at LIMIT $4)
    UNION
    (SELECT run.id FROM (SELECT run_id, bool_or(kind IN ('destroy', 'resume')) AS is_order
                         FROM signal WHERE seen_at IS NULL GROUP BY run_id) AS unseen
     JOIN run ON run.id = unseen.run_id
     WHERE run.shard = ANY ($1::smallint[]) AND run.finished_at IS NULL
       AND (run.lease_until IS NULL OR run.lease_until < now())
       AND CASE WHEN run.parked_at IS NULL THEN run.not_before <= now() ELSE unseen.is_order END
     LIMIT $4)
), due AS (
    SELECT run.id,
           EXISTS (SELECT FROM signal WHERE run_id = run.id AND seen_at IS NULL AND kind = 'destroy') AS asked
    FROM run JOIN candidate ON candidate.id = run.id
    WHERE run.finished_at IS NULL AND (run.lease_until IS NULL OR run.lease_until < now())
    LIMIT $4
    FOR NO KEY UPDATE OF run SKIP LOCKED
)"""

# What a run remembers of a step it has left: [step, since, until, tries, how it ended, code of the last failed try], of the
# last 32. Times are seconds since 1970. Written by the statement that leaves the step, so it costs no round trip.
_LEFT = """CASE WHEN jsonb_array_length(run.history) >= 32 THEN run.history - 0 ELSE run.history END
        || jsonb_build_array(jsonb_build_array({step}, round(extract(epoch FROM run.entered_at), 3),
            round(extract(epoch FROM clock_timestamp()), 3), run.failures + 1, {state}, {code}))"""
_LEFT_BY_OUTCOME = _LEFT.format(
    step="{step}", state="CASE WHEN run.deadline_at IS NULL THEN 'rested' ELSE 'done' END", code="run.failed_code"
)

# $2 the first lease number, $3 {program: {step: seconds it may take}} (`start` is the first step's other name).
# The retry is scheduled here, by full jitter, even if we die: up to 1, 2, 4 … 60 seconds. Turning to `destroy` cuts the
# step off; a resume enters the parked step anew.
_CLAIM = (
    """
, numbered AS (SELECT id, asked, $2::bigint - 1 + row_number() OVER () AS lease FROM due
), claimed AS (
    UPDATE run SET
        lease = numbered.lease,
        lease_until = now() + interval '15 seconds',
        attempt = run.attempt + 1,
        wake_at = now() + random() * least(60.0, power(2, least(run.attempt, 6))) * interval '1 second',
        destroy_at = CASE WHEN numbered.asked THEN coalesce(run.destroy_at, now()) ELSE run.destroy_at END,
        step = CASE WHEN numbered.asked OR run.destroy_at IS NOT NULL THEN 'destroy' ELSE run.step END,
        deadline_at = CASE
            WHEN numbered.asked AND (run.step <> 'destroy' OR run.parked_at IS NOT NULL)
                THEN now() + ($3::jsonb -> run.program ->> 'destroy')::float8 * interval '1 second'
            WHEN run.parked_at IS NOT NULL OR (run.step = 'start' AND run.deadline_at IS NULL)
                THEN now() + ($3::jsonb -> run.program ->> run.step)::float8 * interval '1 second'
            ELSE run.deadline_at END,
        entered_at = CASE WHEN (numbered.asked AND run.step <> 'destroy') OR run.parked_at IS NOT NULL THEN now()
            ELSE run.entered_at END,
        history = CASE WHEN numbered.asked AND run.step NOT IN ('destroy', 'start') AND run.parked_at IS NULL THEN """
    + _LEFT.format(
        step="run.step", state="CASE WHEN run.deadline_at IS NULL THEN 'rested' ELSE 'cut' END", code="run.failed_code"
    )
    + """ ELSE run.history END,
        failures = CASE WHEN (numbered.asked AND run.step <> 'destroy') OR run.parked_at IS NOT NULL THEN 0
            ELSE run.failures END,
        failed_code = CASE WHEN (numbered.asked AND run.step <> 'destroy') OR run.parked_at IS NOT NULL THEN NULL
            ELSE run.failed_code END,
        overdue_at = CASE WHEN run.parked_at IS NOT NULL OR (numbered.asked AND run.step <> 'destroy') THEN NULL
            ELSE run.overdue_at END,
        parked_at = NULL, parked_code = NULL, parked_detail = NULL
    FROM numbered
    WHERE run.id = numbered.id AND run.finished_at IS NULL AND (run.lease_until IS NULL OR run.lease_until < now())
    RETURNING run.id, run.program, run.subject, run.shard, run.step, run.memo, run.lease, run.attempt, run.last_error,
              run.destroy_at, run.deadline_at, run.overdue_at, run.ready_at, run.traceparent
), fresh AS (
    UPDATE signal SET seen_at = now() FROM claimed WHERE signal.run_id = claimed.id AND signal.seen_at IS NULL
    RETURNING signal.id, signal.run_id, signal.kind, signal.body
), told AS (
    SELECT id, run_id, kind, body FROM fresh
    UNION ALL
    SELECT signal.id, signal.run_id, signal.kind, signal.body
    FROM signal JOIN claimed ON signal.run_id = claimed.id WHERE signal.seen_at IS NOT NULL
)
SELECT claimed.*, (SELECT json_agg(json_build_object('kind', told.kind, 'body', told.body) ORDER BY told.id)
                   FROM told WHERE told.run_id = claimed.id) AS signals
FROM claimed"""
)

CLAIM_BY_ID = _DUE_BY_ID + _CLAIM
CLAIM_BY_SHARD = _DUE_BY_SHARD + _CLAIM

FENCE = "SELECT 1 FROM run WHERE id = $1 AND lease = $2 FOR NO KEY UPDATE"

# The same, and whether an operation waits for what this step may bring about.
FENCE_AND_LOOK = """
SELECT EXISTS (SELECT FROM operation WHERE subject_id = run.subject AND finished_at IS NULL)
FROM run WHERE id = $1 AND lease = $2 FOR NO KEY UPDATE OF run"""

# The same with BEGIN in one round trip; both values are made by us and checked (an id, an integer).
BEGIN_FENCED = "BEGIN; SELECT 1 FROM run WHERE id = '{run_id}' AND lease = {lease} FOR NO KEY UPDATE"

# Rows that a step's own transaction holds are passed over: its commit is near, and two more renewals are to come.
RENEW = """
WITH held AS (
    SELECT * FROM unnest($1::text[], $2::bigint[]) AS held (id, lease)
), mine AS (
    SELECT run.id FROM run JOIN held ON run.id = held.id AND run.lease = held.lease
    FOR NO KEY UPDATE OF run SKIP LOCKED
), renewed AS (
    UPDATE run SET lease_until = now() + interval '15 seconds' FROM mine WHERE run.id = mine.id
)
SELECT held.id FROM held LEFT JOIN run ON run.id = held.id AND run.lease = held.lease WHERE run.id IS NULL"""

# $3 step, $4 memo (NULL: as it was), $5 seconds until the new step's deadline (NULL: a rest step), $6 the step that is left.
HOP = f"""
UPDATE run SET step = $3, memo = coalesce($4::jsonb, memo), attempt = 1, last_error = NULL,
    lease_until = now() + interval '15 seconds', entered_at = clock_timestamp(),
    history = {_LEFT_BY_OUTCOME.format(step="$6::text")}, failures = 0, failed_code = NULL,
    deadline_at = now() + $5::float8 * interval '1 second', overdue_at = NULL
WHERE id = $1 AND lease = $2
RETURNING EXISTS (SELECT FROM signal WHERE run_id = $1 AND seen_at IS NULL AND kind = 'destroy') AS is_destroy_asked"""

# $5 seconds until the clock wakes it (NULL: only a signal does).
SETTLE = """
UPDATE run SET step = $3, memo = coalesce($4::jsonb, memo), attempt = 0, last_error = NULL, lease = NULL, lease_until = NULL,
    wake_at = now() + $5::float8 * interval '1 second', not_before = now()
WHERE id = $1 AND lease = $2
RETURNING EXISTS (SELECT FROM signal WHERE run_id = $1 AND seen_at IS NULL) AS is_signalled"""

REMEMBER = "UPDATE run SET memo = $3::jsonb WHERE id = $1 AND lease = $2"

MOVE = "UPDATE run SET shard = $3::smallint WHERE id = $1 AND lease = $2"

CONSUME = "DELETE FROM signal WHERE run_id = $1 AND seen_at IS NOT NULL"

# These three leave the step as it is (`start` gets its name, $n): when the answer to a commit was lost, the row may be one step
# further than we know, and must not be turned back.

# The scheduled wake_at stays; one that has passed meanwhile (a chain of hops, a slow step) is drawn again. $5 code.
RELEASE = """
UPDATE run SET step = CASE WHEN step = 'start' THEN $4 ELSE step END, lease = NULL, lease_until = NULL, last_error = $3,
    failures = failures + 1, failed_code = $5,
    not_before = now() + least(attempt, 10) * interval '1 second',
    wake_at = CASE WHEN wake_at > now() THEN wake_at
        ELSE now() + random() * least(60.0, power(2, least(attempt, 6))) * interval '1 second' END
WHERE id = $1 AND lease = $2
RETURNING attempt, extract(epoch FROM wake_at - now())::float8 AS seconds"""

# Give it back untried: the process ends, or the run has to be looked at anew.
PUT_BACK = """
UPDATE run SET step = CASE WHEN step = 'start' THEN $3 ELSE step END, lease = NULL, lease_until = NULL,
    attempt = greatest(attempt - 1, 0), wake_at = now(),
    not_before = now()
WHERE id = $1 AND lease = $2"""

PARK = f"""
WITH parked AS (
    UPDATE run SET step = CASE WHEN step = 'start' THEN $5 ELSE step END, parked_at = now(), parked_code = $3,
        parked_detail = $4, last_error = $4, attempt = 0,
        history = {_LEFT.format(step="$5::text", state="'failed'", code="$3::text")},
        lease = NULL, lease_until = NULL, wake_at = NULL, not_before = now()
    WHERE id = $1 AND lease = $2
    RETURNING id, program, subject
), told AS (
    INSERT INTO signal (run_id, kind, body)
    SELECT run_child.parent, 'child_parked',
           jsonb_build_object('program', parked.program, 'subject', parked.subject, 'code', $3::text)
    FROM parked JOIN run_child ON run_child.child = parked.id
    RETURNING run_id
)
SELECT parked.id, (SELECT array_agg(run_id) FROM told) AS told,
       EXISTS (SELECT FROM signal WHERE run_id = $1 AND seen_at IS NULL AND kind IN ('destroy', 'resume')) AS is_signalled
FROM parked"""

READY = """
WITH ready AS (
    UPDATE run SET ready_at = now() WHERE id = $1 AND lease = $2 AND ready_at IS NULL RETURNING id, program, subject
)
INSERT INTO signal (run_id, kind, body)
SELECT run_child.parent, 'child_ready', jsonb_build_object('program', ready.program, 'subject', ready.subject)
FROM ready JOIN run_child ON run_child.child = ready.id
RETURNING run_id"""

# A signal's sender holds the lock of (program, subject) shared until it commits; who finishes must get it alone, at
# once, and only then look for signals: so a committed signal is either seen or was refused because the run had ended.
LOCK_TO_SIGNAL = "SELECT pg_advisory_xact_lock_shared(hashtextextended($1 || ':' || $2, 0))"
LOCK_TO_FINISH = "SELECT pg_try_advisory_xact_lock(hashtextextended($1 || ':' || $2, 0))"

FINISH = f"""
WITH finished AS (
    UPDATE run SET finished_at = now(), result = $3::jsonb, step = $4, lease = NULL, lease_until = NULL, wake_at = NULL,
        history = {_LEFT_BY_OUTCOME.format(step="$4::text")},
        attempt = 0, last_error = NULL, ready_at = coalesce(ready_at, now())
    WHERE id = $1 AND lease = $2 AND NOT EXISTS (SELECT FROM signal WHERE run_id = $1 AND seen_at IS NULL)
    RETURNING id, program, subject
), told AS (
    INSERT INTO signal (run_id, kind, body)
    SELECT run_child.parent, 'child_done', jsonb_build_object('program', finished.program, 'subject', finished.subject)
    FROM finished JOIN run_child ON run_child.child = finished.id
    RETURNING run_id
)
SELECT finished.id, (SELECT array_agg(run_id) FROM told) AS told FROM finished"""

# $1 id, $2 program, $3 subject, $4 shard, $5 traceparent. Looks first: ON CONFLICT would wait for a step's transaction.
START = """
WITH existing AS (
    SELECT id, shard FROM run WHERE program = $2 AND subject = $3 AND finished_at IS NULL
), made AS (
    INSERT INTO run (id, program, subject, shard, traceparent)
    SELECT $1, $2, $3, $4::smallint, $5 WHERE NOT EXISTS (SELECT FROM existing)
    ON CONFLICT (program, subject) WHERE finished_at IS NULL DO NOTHING
    RETURNING id, shard
)
SELECT id, shard, true AS is_new FROM made UNION ALL SELECT id, shard, false FROM existing"""

# Whether this step (a try of it that died, perhaps) has spawned a child that has ended already.
HAS_SPAWNED = """
SELECT EXISTS (
    SELECT FROM run_child
    JOIN run AS parent ON parent.id = run_child.parent
    JOIN run AS child ON child.id = run_child.child
    WHERE run_child.parent = $1 AND child.program = $2 AND child.subject = $3 AND child.finished_at IS NOT NULL
      AND run_child.created_at >= parent.entered_at
)"""

LINK = "INSERT INTO run_child (parent, child) VALUES ($1, $2) ON CONFLICT DO NOTHING"

# By (program, subject): $1, $2; $3 kind, $4 body. No row: there is no unfinished run.
SIGNAL = """
WITH addressed AS (
    SELECT id, shard FROM run WHERE program = $1 AND subject = $2 AND finished_at IS NULL
), told AS (
    INSERT INTO signal (run_id, kind, body) SELECT id, $3, $4::jsonb FROM addressed
)
SELECT id, shard FROM addressed"""

SIGNAL_PARENTS = """
INSERT INTO signal (run_id, kind, body) SELECT parent, $2, $3::jsonb FROM run_child WHERE child = $1 RETURNING run_id"""

# A parked child that has been told to try again (or to end) counts as working.
CHILDREN = """
SELECT run.id, run.program, run.subject, run.ready_at, run.finished_at,
    CASE WHEN NOT EXISTS (SELECT FROM signal WHERE run_id = run.id AND seen_at IS NULL AND kind IN ('destroy', 'resume'))
        THEN run.parked_code END AS parked_code
FROM run_child JOIN run ON run.id = run_child.child WHERE run_child.parent = $1 ORDER BY run.program, run.subject"""

# A failure goes from children to parents, so an operator's resume is told to the whole family.
RESUME = """
WITH RECURSIVE family (id) AS (
    SELECT id FROM run WHERE program = $1 AND subject = $2 AND finished_at IS NULL
    UNION
    SELECT CASE WHEN run_child.parent = family.id THEN run_child.child ELSE run_child.parent END
    FROM family JOIN run_child ON family.id IN (run_child.parent, run_child.child)
), addressed AS (
    SELECT run.id, run.shard FROM run JOIN family ON family.id = run.id
    WHERE run.finished_at IS NULL AND (run.parked_at IS NOT NULL OR (run.program = $1 AND run.subject = $2))
), told AS (
    INSERT INTO signal (run_id, kind) SELECT id, 'resume' FROM addressed
)
SELECT id, shard FROM addressed"""

UNFINISHED_SUBJECTS = "SELECT subject FROM run WHERE program = $1 AND finished_at IS NULL"

SHARDS_OF = "SELECT id, shard FROM run WHERE id = ANY ($1::text[])"

RUN_DUE_CHANNEL = "bedplate_run_due"
NOTIFY_RUN_DUE = "SELECT pg_notify('bedplate_run_due', $1)"

# Deadlines: counted once for each time a step is entered; the run goes on.
MISSED_DEADLINES = """
UPDATE run SET overdue_at = now() WHERE id IN (
    SELECT id FROM run
    WHERE shard = ANY ($1::smallint[]) AND finished_at IS NULL AND parked_at IS NULL
      AND deadline_at < now() AND overdue_at IS NULL
    FOR NO KEY UPDATE SKIP LOCKED
)
RETURNING id, program, subject, step, attempt, last_error, extract(epoch FROM now() - deadline_at)::float8 AS seconds_late"""

COUNT_OVERDUE = """
SELECT count(*) FROM run
WHERE shard = ANY ($1::smallint[]) AND finished_at IS NULL AND parked_at IS NULL AND deadline_at < now()"""

# Incidents: one open row per (subject, code, run); a repeat counts and brings the words up to date.
OPEN_INCIDENT = """
INSERT INTO incident (id, code, subject, run_id, program, step, detail, context)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8::jsonb)
ON CONFLICT (subject, code, run_id) WHERE resolved_at IS NULL
DO UPDATE SET count = incident.count + 1, last_at = now(), detail = excluded.detail, step = excluded.step,
    context = excluded.context
RETURNING id, count"""

RESOLVE_RUN_INCIDENTS = """
UPDATE incident SET resolved_at = now(), resolved_by = $2
WHERE run_id = $1 AND resolved_at IS NULL AND ($3::text[] IS NULL OR code = ANY ($3::text[])) AND code <> ALL ($4::text[])"""

# What a worker that died between an outcome and this could not close any more: incidents of runs that ended or are well.
RESOLVE_HEALED_INCIDENTS = """
UPDATE incident SET resolved_at = now(), resolved_by = 'kernel'
WHERE resolved_at IS NULL AND run_id IS NOT NULL AND NOT EXISTS (
    SELECT FROM run WHERE run.id = incident.run_id AND run.finished_at IS NULL
      AND CASE WHEN incident.code = $1 THEN run.overdue_at IS NOT NULL
          ELSE run.parked_at IS NOT NULL OR run.last_error IS NOT NULL END)
RETURNING id"""

RESOLVE_SUBJECT_INCIDENT = """
UPDATE incident SET resolved_at = now(), resolved_by = $3
WHERE subject = $1 AND code = $2 AND run_id IS NULL AND resolved_at IS NULL"""

# Shards: a lease of 10 s looked after every 2.5 s, so that a dead worker's shards are taken over within 15 s.
MAKE_SHARDS = "INSERT INTO shard (id) SELECT generate_series(0, 63) ON CONFLICT DO NOTHING"

HAS_SHARDS = "SELECT count(*) > 0 FROM shard"

BE_PRESENT = """
INSERT INTO worker_presence (worker, present_until) VALUES ($1, now() + interval '10 seconds')
ON CONFLICT (worker) DO UPDATE SET present_until = excluded.present_until"""

# Keep our share, give back what is over it, take what is free up to it; returns what we hold now.
LEASE_SHARDS = """
WITH share AS (
    SELECT ceil(64.0 / greatest(count(*), 1))::int AS size FROM worker_presence WHERE present_until > now()
), wanted AS (
    SELECT id FROM shard
    WHERE worker = $1 OR worker IS NULL OR lease_until < now()
    ORDER BY (worker IS NOT DISTINCT FROM $1) DESC, id
    LIMIT (SELECT size FROM share)
    FOR UPDATE SKIP LOCKED
), given_back AS (
    UPDATE shard SET worker = NULL, lease_until = NULL
    WHERE worker = $1 AND id NOT IN (SELECT id FROM wanted)
)
UPDATE shard SET worker = $1, lease_until = now() + interval '10 seconds' WHERE id IN (SELECT id FROM wanted) RETURNING id"""

LEAVE = """
WITH gone AS (DELETE FROM worker_presence WHERE worker = $1 OR present_until < now() - interval '1 hour')
UPDATE shard SET worker = NULL, lease_until = NULL WHERE worker = $1"""

IS_ANYONE_PRESENT = "SELECT count(*) > 0 FROM worker_presence WHERE present_until > now()"

# What ended long ago is forgotten: $1 days.
PRUNE = """
WITH old AS (
    SELECT id FROM run WHERE finished_at < now() - $1::int * interval '1 day' ORDER BY finished_at LIMIT 1000
), signals AS (
    DELETE FROM signal WHERE run_id IN (SELECT id FROM old)
), links AS (
    DELETE FROM run_child WHERE parent IN (SELECT id FROM old) OR child IN (SELECT id FROM old)
)
DELETE FROM run WHERE id IN (SELECT id FROM old)"""
