/** Who is signed in, and what they may do where. */
import { useQuery } from "@tanstack/react-query";
import { api } from "./client";
import type { Problem } from "./problem";
import type { components } from "./schema";

export type Me = components["schemas"]["CurrentUser"];
export type Role = "viewer" | "editor" | "admin";
const RANK: Record<Role, number> = { viewer: 1, editor: 2, admin: 3 };

export function useMe() {
  return useQuery<Me | null, Problem>({
    queryKey: ["me"],
    queryFn: async () => {
      try {
        return (await api.GET("/v1/users/current")).data ?? null;
      } catch (problem) {
        if ((problem as Problem).status === 401) return null;
        throw problem;
      }
    },
    staleTime: 60_000,
  });
}

export function useSignOut() {
  return async () => {
    await api.DELETE("/v1/sessions/current");
    window.location.assign("/");
  };
}

/** Why this person may not do it here; undefined when they may. The API decides; this only says so beforehand. */
export function useRefusal(project: string | null, needs: Role): string | undefined {
  const { data: me } = useMe();
  if (!me || me.is_operator) return undefined;
  const role = me.memberships.find((item) => item.project === project || item.project_id === project)?.role as Role | undefined;
  if (!project || !role) return "Needs an operator";
  return RANK[role] >= RANK[needs] ? undefined : `Needs the role ${needs} in ${project}; yours is ${role}`;
}
