"""The watch's statements. The one rule: all SQL of this package stands here and is tried against the schema by its tests."""

from __future__ import annotations

BE_PRESENT = """
INSERT INTO watch_presence (watch, present_until, socket) VALUES ($1, now() + interval '15 s', $2)
ON CONFLICT (watch) DO UPDATE SET present_until = excluded.present_until, socket = excluded.socket
"""
FORGET_ABSENT = "DELETE FROM watch_presence WHERE present_until < now() - interval '1 h'"
MAKE_SHARDS = "INSERT INTO watch_shard (id) SELECT generate_series(0, $1::int - 1) ON CONFLICT DO NOTHING"
SHARE = "SELECT ceil($1::numeric / greatest(count(*), 1))::int FROM watch_presence WHERE present_until > now()"
LEASE = """
UPDATE watch_shard SET watch = $1, lease_until = now() + interval '15 s'
WHERE id IN (
  SELECT id FROM watch_shard WHERE watch = $1 OR watch IS NULL OR lease_until < now()
  ORDER BY (watch IS NOT DISTINCT FROM $1) DESC, id LIMIT $2 FOR UPDATE SKIP LOCKED
)
RETURNING id
"""
GIVE_BACK = "UPDATE watch_shard SET watch = NULL, lease_until = NULL WHERE watch = $1 AND NOT (id = ANY($2::smallint[]))"
LEAVE = "DELETE FROM watch_presence WHERE watch = $1"

# A host is watched from its first contact on until it is gone; one that was never reached has no facts.
HOSTS = "SELECT id FROM host WHERE facts IS NOT NULL AND ssh_key_sealed IS NOT NULL AND state <> 'removing'"
READ_CURSOR = "SELECT log, seq FROM host_cursor WHERE host_id = $1"
SAVE_CURSOR = """
INSERT INTO host_cursor (host_id, log, seq) SELECT id, $2::text, $3::bigint FROM host WHERE id = $1
ON CONFLICT (host_id) DO UPDATE SET log = excluded.log, seq = excluded.seq, heard_at = now()
"""
SET_LINK = """
UPDATE host SET link = $2::text, link_changed_at = now() WHERE id = $1 AND link <> $2::text RETURNING id
"""
COPIES = "SELECT id FROM image_copy WHERE host_id = $1 AND image_id = $2"
HELD_BY_HOST = """
SELECT kind, object_id FROM host_document WHERE host_id = $1 AND kind IN ('address', 'loadbalancer') AND is_wanted
"""
BALANCED_BY_EDGES = """
SELECT id FROM loadbalancer WHERE EXISTS (SELECT FROM host WHERE id = $1 AND 'edge' = ANY (roles))
"""
HOLDS_ALONE = """
SELECT EXISTS (
  SELECT FROM host_document
  WHERE host_id = $1 AND kind = 'address' AND is_wanted AND document ->> 'announce' = 'arp'
    AND coalesce(document ->> 'standby_for', '') = ''
)
"""
HELD_ALONE = """
SELECT object_id FROM host_document
WHERE host_id = $1 AND kind = 'address' AND is_wanted AND document ->> 'announce' = 'arp'
    AND coalesce(document ->> 'standby_for', '') = '' ORDER BY object_id
"""
RENEW_HOLDER = """
INSERT INTO holder_lease (host_id, lease_until) SELECT id, now() + $2 * interval '1 s' FROM host WHERE id = $1
ON CONFLICT (host_id) DO UPDATE SET lease_until = excluded.lease_until
"""
VMS_OF_HOST = "SELECT id FROM vm WHERE host_id = $1"
