/** Dialogs: one for asking a name before something is destroyed, one for anything else. */
import { type ReactNode, useState } from "react";
import { Button, Dialog, Heading, Modal, ModalOverlay } from "react-aria-components";
import { Trouble } from "./basics";

export function Box({ title, children, onClose }: { title: string; children: ReactNode; onClose: () => void }) {
  return (
    <ModalOverlay isOpen isDismissable onOpenChange={(isOpen) => !isOpen && onClose()} className="fixed inset-0 z-20 flex items-start justify-center bg-black/40 p-6 pt-[10vh]">
      <Modal className="card max-h-[80vh] w-full max-w-xl overflow-auto p-5 shadow-xl">
        <Dialog className="outline-none">
          <Heading slot="title" className="m-0 mb-3 text-lg font-semibold">{title}</Heading>
          {children}
        </Dialog>
      </Modal>
    </ModalOverlay>
  );
}

/** Tells what is lost and asks for the name; several at once ask for their number. */
export function Destroy(props: { verb: string; names: string[]; blast: string; onClose: () => void; onDo: () => Promise<void> }) {
  const { verb, names, blast, onClose, onDo } = props;
  const wanted = names.length === 1 ? (names[0] ?? "") : String(names.length);
  const [typed, setTyped] = useState("");
  const [problem, setProblem] = useState<unknown>(null);
  const [isBusy, setBusy] = useState(false);
  const go = async () => {
    setBusy(true);
    try {
      await onDo();
      onClose();
    } catch (error) {
      setProblem(error);
      setBusy(false);
    }
  };
  return (
    <Box title={`${verb} ${names.length === 1 ? wanted : `${names.length} things`}`} onClose={onClose}>
      <p>{blast}</p>
      {names.length > 1 && <p className="soft">{names.join(", ")}</p>}
      <label className="block">
        Type <code>{wanted}</code> to go on
        <input className="field mt-1" value={typed} onChange={(event) => setTyped(event.target.value)} autoFocus />
      </label>
      {problem !== null && <div className="mt-3"><Trouble problem={problem} /></div>}
      <div className="mt-4 flex justify-end gap-2">
        <Button className="button" onPress={onClose}>Cancel</Button>
        <Button className="button danger" isDisabled={typed !== wanted || isBusy} onPress={() => void go()}>{verb}</Button>
      </div>
    </Box>
  );
}
