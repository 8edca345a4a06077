/** The menu of a row: what cannot be done is there too, with its reason. One menu serves all rows of a list. */
import { useRef } from "react";
import { Menu, MenuItem, Popover, Text } from "react-aria-components";

export type Item = { key: string; title: string; reason?: string | undefined; isDanger?: boolean; onAction: () => void };

export function MenuButton({ label, onOpen }: { label: string; onOpen: (anchor: HTMLElement) => void }) {
  return (
    <button type="button" className="button px-2 py-0.5" aria-label={label} aria-haspopup="menu" onClick={(event) => onOpen(event.currentTarget)}>
      ⋯
    </button>
  );
}

export function RowMenu({ anchor, label, items, onClose }: { anchor: HTMLElement; label: string; items: Item[]; onClose: () => void }) {
  const trigger = useRef(anchor);
  trigger.current = anchor;
  return (
    <Popover isOpen triggerRef={trigger} onOpenChange={(isOpen) => !isOpen && onClose()} className="card min-w-44 p-1 shadow-lg">
      <Menu
        aria-label={label}
        autoFocus="first"
        className="outline-none"
        disabledKeys={items.filter((item) => item.reason).map((item) => item.key)}
        onClose={onClose}
        onAction={(key) => items.find((item) => item.key === key)?.onAction()}
      >
        {items.map((item) => (
          <MenuItem key={item.key} id={item.key} textValue={item.title} className="cursor-pointer rounded px-3 py-1.5 data-[disabled]:cursor-not-allowed data-[focused]:bg-(--page)">
            <Text slot="label" style={item.isDanger ? { color: "var(--bad)" } : {}}>{item.title}</Text>
            {item.reason && <Text slot="description" className="block text-xs soft">{item.reason}</Text>}
          </MenuItem>
        ))}
      </Menu>
    </Popover>
  );
}
