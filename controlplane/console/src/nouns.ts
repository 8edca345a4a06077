/** Every noun the console shows. Paths, fields and operation ids are checked against the OpenAPI document at build time. */
import type { Role } from "./api/session";
import type { operations, paths } from "./api/schema";

type ListPath = {
  [P in keyof paths]: paths[P] extends { get: { responses: { 200: { content: { "application/json": { items: unknown[] } } } } } }
    ? P
    : never;
}[keyof paths];
type Item<P extends ListPath> = paths[P] extends {
  get: { responses: { 200: { content: { "application/json": { items: (infer I)[] } } } } };
}
  ? I
  : never;

export type Kind = "text" | "code" | "state" | "time" | "bytes" | "list" | "yes" | "address";
export type Column<I> = { title: string; field: (keyof I & string) | `${keyof I & string}.${string}`; kind?: Kind };
export type Action = { verb: string; title: string; needs?: Role; operation?: keyof operations; danger?: string };

export type Noun = {
  key: string;
  title: string;
  one: string;
  path: string;
  cli: string;
  group: "Compute" | "Network" | "Inference" | "Project" | "Operator";
  columns: Column<Record<string, unknown>>[];
  create?: keyof operations;
  update?: keyof operations;
  remove?: { title: string; blast: string };
  actions: Action[];
  empty: string;
  first: string;
};

type Given<P extends ListPath> = Omit<Noun, "columns" | "path" | "actions"> & { path: P; columns: Column<Item<P>>[]; actions?: Action[] };

function noun<P extends ListPath>(given: Given<P>): Noun {
  return { actions: [], ...given } as unknown as Noun;
}

const P = "/v1/projects/{project}" as const;

export const NOUNS: Noun[] = [
  noun({
    key: "vms", title: "Virtual machines", one: "virtual machine", path: `${P}/vms`, cli: "vm", group: "Compute", create: "vms_create", update: "vms_update",
    columns: [
      { title: "Status", field: "status", kind: "state" }, { title: "IPv4", field: "ipv4", kind: "address" }, { title: "Image", field: "image" },
      { title: "Isolation", field: "isolation" }, { title: "Age", field: "created_at", kind: "time" },
    ],
    actions: [{ verb: "start", title: "Start" }, { verb: "stop", title: "Stop" }, { verb: "restart", title: "Restart" }, { verb: "resize", title: "Resize", operation: "vms_resize" }],
    remove: { title: "Delete", blast: "The machine stops and its root disk is erased." },
    empty: "No machines here yet.", first: "bedplate vm create web-1 --image debian-12 --network default",
  }),
  noun({
    key: "volumes", title: "Volumes", one: "volume", path: `${P}/volumes`, cli: "volume", group: "Compute", create: "volumes_create", update: "volumes_update",
    columns: [
      { title: "Status", field: "status", kind: "state" }, { title: "Size", field: "size_bytes", kind: "bytes" }, { title: "Machine", field: "vm" },
      { title: "Root", field: "is_root", kind: "yes" }, { title: "Unlocked by", field: "unlock" }, { title: "Pool", field: "pool" }, { title: "Age", field: "created_at", kind: "time" },
    ],
    actions: [
      { verb: "attach", title: "Attach", operation: "volumes_attach" }, { verb: "detach", title: "Detach" }, { verb: "grow", title: "Grow", operation: "volumes_grow" },
      { verb: "snapshot", title: "Take a snapshot", operation: "volumes_snapshot" }, { verb: "restore", title: "Take back from deletion" },
    ],
    remove: { title: "Delete", blast: "Its data is unreadable once its retention is over: its key is destroyed." },
    empty: "No volumes here yet.", first: "bedplate volume create data --size 10G",
  }),
  noun({
    key: "snapshots", title: "Snapshots", one: "snapshot", path: `${P}/snapshots`, cli: "snapshot", group: "Compute", create: "snapshots_create", update: "snapshots_update",
    columns: [{ title: "Status", field: "status", kind: "state" }, { title: "Volume", field: "volume" }, { title: "Size", field: "size_bytes", kind: "bytes" }, { title: "Age", field: "created_at", kind: "time" }],
    remove: { title: "Delete", blast: "No volume can be made from it any more." },
    empty: "No snapshots here yet.", first: "bedplate volume snapshot data --name before",
  }),
  noun({
    key: "networks", title: "Networks", one: "network", path: `${P}/networks`, cli: "network", group: "Network", create: "networks_create", update: "networks_update",
    columns: [
      { title: "IPv4", field: "ipv4_cidr", kind: "code" }, { title: "IPv6", field: "ipv6_cidr", kind: "code" },
      { title: "Encryption", field: "encryption" }, { title: "MTU", field: "mtu_bytes" }, { title: "Age", field: "created_at", kind: "time" },
    ],
    remove: { title: "Delete", blast: "Machines can no longer be put into it; it must be empty." },
    empty: "No private networks here yet.", first: "bedplate network create default",
  }),
  noun({
    key: "firewalls", title: "Firewalls", one: "firewall", path: `${P}/firewalls`, cli: "firewall", group: "Network", create: "firewalls_create", update: "firewalls_update",
    columns: [{ title: "Attached to", field: "attached_to", kind: "list" }, { title: "Rules", field: "rules", kind: "list" }, { title: "Age", field: "created_at", kind: "time" }],
    remove: { title: "Delete", blast: "What only its rules let in is refused from then on." },
    empty: "No firewalls here yet.", first: "bedplate firewall create web",
  }),
  noun({
    key: "addresses", title: "Addresses", one: "address", path: `${P}/addresses`, cli: "address", group: "Network", create: "addresses_create",
    columns: [{ title: "Address", field: "address", kind: "address" }, { title: "Family", field: "family" }, { title: "Held by", field: "held_by" }, { title: "Age", field: "created_at", kind: "time" }],
    remove: { title: "Release", blast: "The address goes back to its pool and may be somebody else's next." },
    empty: "No public addresses here yet.", first: "bedplate address reserve web --pool public",
  }),
  noun({
    key: "loadbalancers", title: "Load balancers", one: "load balancer", path: `${P}/loadbalancers`, cli: "lb", group: "Network", create: "loadbalancers_create", update: "loadbalancers_update",
    columns: [
      { title: "Status", field: "status", kind: "state" }, { title: "VIPs", field: "vips", kind: "list" }, { title: "Backends", field: "backends", kind: "list" },
      { title: "Algorithm", field: "algorithm" }, { title: "Age", field: "created_at", kind: "time" },
    ],
    remove: { title: "Delete", blast: "Connections through it are cut; its address stays reserved." },
    empty: "No load balancers here yet.", first: "bedplate lb create web --port 80",
  }),
  noun({
    key: "endpoints", title: "Endpoints", one: "endpoint", path: `${P}/endpoints`, cli: "endpoint", group: "Inference", create: "endpoints_create", update: "endpoints_update",
    columns: [{ title: "Status", field: "status", kind: "state" }, { title: "Model", field: "model" }, { title: "Replicas", field: "replicas", kind: "list" }, { title: "Age", field: "created_at", kind: "time" }],
    actions: [
      { verb: "scale", title: "Scale", operation: "endpoints_scale" },
      { verb: "promote", title: "Promote", operation: "endpoints_promote" },
      { verb: "rollback", title: "Roll back", operation: "endpoints_rollback" },
    ],
    remove: { title: "Delete", blast: "Its replicas end; requests to its model are refused." },
    empty: "No models are served here yet.", first: "bedplate endpoint create chat --model smollm2-135m-instruct",
  }),
  noun({
    key: "routes", title: "Routes", one: "route", path: `${P}/routes`, cli: "route", group: "Inference", create: "routes_create", update: "routes_update",
    columns: [{ title: "Targets", field: "targets", kind: "list" }, { title: "Rules", field: "rules", kind: "list" }, { title: "Age", field: "created_at", kind: "time" }],
    remove: { title: "Delete", blast: "Requests to this model name are refused." },
    empty: "No routes here yet: an endpoint answers to its own model's name.", first: "bedplate route create chat-model --target chat",
  }),
  noun({
    key: "keys", title: "Keys", one: "key", path: `${P}/keys`, cli: "key", group: "Inference", create: "keys_create", update: "keys_update",
    columns: [{ title: "Ends with", field: "hint", kind: "code" }, { title: "Models", field: "models", kind: "list" }, { title: "Expires", field: "expires_at", kind: "time" }, { title: "Age", field: "created_at", kind: "time" }],
    remove: { title: "Revoke", blast: "Applications with this key are refused within a second." },
    empty: "No keys here yet.", first: "bedplate key create app",
  }),
  noun({
    key: "members", title: "Members", one: "member", path: `${P}/members`, cli: "member", group: "Project", create: "members_create", update: "members_update",
    columns: [{ title: "Person", field: "user_name" }, { title: "Role", field: "role" }, { title: "Since", field: "created_at", kind: "time" }],
    remove: { title: "Remove", blast: "The person sees this project no more." },
    empty: "Nobody is a member yet; operators see it all the same.", first: "bedplate member add ada@example.org editor",
  }),
  noun({
    key: "audit", title: "Audit", one: "entry", path: `${P}/audit`, cli: "audit", group: "Project",
    columns: [{ title: "When", field: "created_at", kind: "time" }, { title: "Who", field: "actor_name" }, { title: "Action", field: "action", kind: "code" }, { title: "Subject", field: "subject_id", kind: "code" }, { title: "Request", field: "request_id", kind: "code" }],
    empty: "Nothing was changed yet.", first: "bedplate network create default",
  }),
  noun({
    key: "models", title: "Models", one: "model", path: "/v1/models", cli: "model", group: "Inference",
    columns: [{ title: "State", field: "state", kind: "state" }, { title: "Title", field: "title" }, { title: "Engine", field: "engine" }, { title: "Size", field: "size_bytes", kind: "bytes" }],
    actions: [{ verb: "import", title: "Import" }],
    empty: "The catalogue is empty.", first: "bedplate model list",
  }),
  noun({
    key: "hosts", title: "Hosts", one: "host", path: "/v1/hosts", cli: "host", group: "Operator",
    columns: [{ title: "State", field: "state", kind: "state" }, { title: "Link", field: "link", kind: "state" }, { title: "Address", field: "address", kind: "address" }, { title: "Roles", field: "roles", kind: "list" }, { title: "Location", field: "location" }, { title: "Cordoned", field: "is_cordoned", kind: "yes" }],
    actions: [{ verb: "drain", title: "Drain", needs: "admin" }, { verb: "undrain", title: "Undrain", needs: "admin" }, { verb: "reboot", title: "Reboot", needs: "admin", danger: "Every machine on the host restarts." }],
    remove: { title: "Remove", blast: "The agent is taken off the machine; it must hold no work." },
    empty: "No hosts are enrolled yet.", first: "bedplate host add root@HOST --name metal-1",
  }),
  noun({
    key: "images", title: "Images", one: "image", path: "/v1/images", cli: "image", group: "Compute",
    columns: [{ title: "State", field: "state", kind: "state" }, { title: "OS", field: "os" }, { title: "Disk", field: "min_disk_bytes", kind: "bytes" }, { title: "Age", field: "created_at", kind: "time" }],
    remove: { title: "Remove", blast: "No new machine can be made from it." },
    empty: "No images yet.", first: "bedplate image import debian-12",
  }),
  noun({
    key: "pools", title: "Address pools", one: "pool", path: "/v1/pools", cli: "pool", group: "Operator", create: "pools_create", update: "pools_update",
    columns: [{ title: "Prefix", field: "cidr", kind: "code" }, { title: "Announced by", field: "announce" }, { title: "Age", field: "created_at", kind: "time" }],
    remove: { title: "Delete", blast: "It must hold no reserved address." },
    empty: "No pools of public addresses yet.", first: "bedplate pool create public --cidr 198.51.100.0/24",
  }),
  noun({
    key: "storage-pools", title: "Storage pools", one: "storage pool", path: "/v1/storage-pools", cli: "storage-pool", group: "Operator",
    columns: [
      { title: "Host", field: "host" }, { title: "Free", field: "free_bytes", kind: "bytes" }, { title: "Reserved", field: "reserved_bytes", kind: "bytes" },
      { title: "Total", field: "total_bytes", kind: "bytes" }, { title: "Available", field: "is_available", kind: "yes" },
    ],
    empty: "No host has told of a pool yet.", first: "bedplate storage-pool list",
  }),
  noun({
    key: "providers", title: "Providers", one: "provider", path: "/v1/providers", cli: "provider", group: "Operator", create: "providers_create", update: "providers_update",
    columns: [{ title: "Kind", field: "kind" }, { title: "Address", field: "base_url", kind: "code" }, { title: "Models", field: "models", kind: "list" }, { title: "Key ends with", field: "hint", kind: "code" }],
    remove: { title: "Delete", blast: "Routes to its models are refused." },
    empty: "No outside providers yet.", first: "bedplate provider create openai",
  }),
  noun({
    key: "prices", title: "Prices", one: "price", path: "/v1/prices", cli: "price", group: "Operator", create: "prices_create",
    columns: [{ title: "Model", field: "model" }, { title: "Prompt", field: "prompt" }, { title: "Completion", field: "completion" }, { title: "From", field: "valid_from", kind: "time" }],
    remove: { title: "Delete", blast: "Use after its start costs what an earlier price says." },
    empty: "Nothing has a price yet.", first: "bedplate price list",
  }),
  noun({
    key: "projects", title: "Projects", one: "project", path: "/v1/projects", cli: "project", group: "Operator", create: "projects_create", update: "projects_update",
    columns: [{ title: "Description", field: "description" }, { title: "Containers", field: "allow_containers", kind: "yes" }, { title: "Age", field: "created_at", kind: "time" }],
    remove: { title: "Delete", blast: "It must be empty." },
    empty: "No projects yet.", first: "bedplate project create default",
  }),
  noun({
    key: "users", title: "People", one: "person", path: "/v1/users", cli: "user", group: "Operator", create: "users_create", update: "users_update",
    columns: [{ title: "Name shown", field: "display_name" }, { title: "Operator", field: "is_operator", kind: "yes" }, { title: "Codes", field: "has_totp", kind: "yes" }, { title: "Disabled", field: "is_disabled", kind: "yes" }],
    actions: [{ verb: "invite", title: "New one-time link", needs: "admin" }],
    remove: { title: "Delete", blast: "Sessions, memberships and personal tokens of this person end." },
    empty: "No people yet.", first: "bedplate user create ada@example.org",
  }),
  noun({
    key: "tokens", title: "Tokens", one: "token", path: "/v1/tokens", cli: "token", group: "Project", create: "tokens_create",
    columns: [{ title: "Role", field: "role" }, { title: "Ends with", field: "hint", kind: "code" }, { title: "Expires", field: "expires_at", kind: "time" }, { title: "Last use", field: "last_used_at", kind: "time" }],
    remove: { title: "Revoke", blast: "Programs with this token are refused at once." },
    empty: "No tokens of yours yet.", first: "bedplate token create laptop --role user",
  }),
  noun({
    key: "incidents", title: "Incidents", one: "incident", path: "/v1/incidents", cli: "incident", group: "Operator",
    columns: [{ title: "State", field: "state", kind: "state" }, { title: "Code", field: "code", kind: "code" }, { title: "What", field: "detail" }, { title: "Times", field: "count" }, { title: "Last", field: "last_at", kind: "time" }],
    actions: [{ verb: "resolve", title: "Resolve", needs: "admin" }],
    empty: "Nothing is wrong.", first: "bedplate incident list",
  }),
  noun({
    key: "operations", title: "Operations", one: "operation", path: "/v1/operations", cli: "operation", group: "Operator",
    columns: [{ title: "State", field: "state", kind: "state" }, { title: "Action", field: "action", kind: "code" }, { title: "Subject", field: "subject_id", kind: "code" }, { title: "Begun", field: "created_at", kind: "time" }],
    empty: "Nothing was done yet.", first: "bedplate operation list",
  }),
];

export const BY_KEY = new Map(NOUNS.map((item) => [item.key, item]));
export const inProject = (item: Noun): boolean => item.path.includes("{project}");
export const pathOf = (item: Noun, project: string | null, id = ""): string =>
  item.path.replace("{project}", encodeURIComponent(project ?? "")) + (id ? `/${encodeURIComponent(id)}` : "");
export const linkOf = (item: Noun, project: string | null, id = ""): string =>
  `${inProject(item) ? `/p/${encodeURIComponent(project ?? "")}` : ""}/${item.key}${id ? `/${encodeURIComponent(id)}` : ""}`;
export const nameOf = (row: Record<string, unknown>): string => String(row.name ?? row.user_name ?? row.action ?? row.id);
