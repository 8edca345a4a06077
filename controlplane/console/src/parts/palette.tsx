/** Cmd-K: go anywhere by typing. */
import { useEffect, useState } from "react";
import { Button, Dialog, Input, ListBox, ListBoxItem, Modal, ModalOverlay, SearchField } from "react-aria-components";
import { useNavigate } from "react-router";
import { inProject, linkOf, NOUNS, type Noun } from "../nouns";

export function Palette({ project, isSeen }: { project: string; isSeen: (noun: Noun) => boolean }) {
  const [isOpen, setOpen] = useState(false);
  const [typed, setTyped] = useState("");
  const navigate = useNavigate();
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if ((event.metaKey || event.ctrlKey) && event.key.toLowerCase() === "k") {
        event.preventDefault();
        setOpen((now) => !now);
      }
    };
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, []);
  const places = NOUNS.filter(isSeen).filter((noun) => noun.title.toLowerCase().includes(typed.toLowerCase()));
  const go = (key: string) => {
    const noun = NOUNS.find((item) => item.key === key);
    if (!noun) return;
    setOpen(false);
    setTyped("");
    navigate(linkOf(noun, inProject(noun) ? project : null));
  };
  return (
    <>
      <Button className="button" onPress={() => setOpen(true)}>Go to… <kbd className="soft text-xs">Ctrl K</kbd></Button>
      <ModalOverlay isOpen={isOpen} onOpenChange={setOpen} isDismissable className="fixed inset-0 z-30 flex items-start justify-center bg-black/40 pt-[15vh]">
        <Modal className="card w-full max-w-md p-2 shadow-xl">
          <Dialog aria-label="Go to" className="outline-none">
            <SearchField aria-label="Page" value={typed} onChange={setTyped} autoFocus>
              <Input className="field" placeholder="Type a page" onKeyDown={(event) => event.key === "Enter" && places[0] && go(places[0].key)} />
            </SearchField>
            <ListBox aria-label="Pages" className="mt-2 max-h-80 overflow-auto outline-none" onAction={(key) => go(String(key))}>
              {places.map((noun) => <ListBoxItem key={noun.key} id={noun.key} textValue={noun.title} className="cursor-pointer rounded px-3 py-1 data-[focused]:bg-(--page)">{noun.title}</ListBoxItem>)}
            </ListBox>
          </Dialog>
        </Modal>
      </ModalOverlay>
    </>
  );
}
