"""An engine that takes turns with other groups on its device."""

from bandmaster import rl


class Yielding(rl.VLLM):
    """An engine that gives up its device in the turns of others."""

    async def on_yield(self):
        await self.sleep()

    async def on_resume(self):
        await self.wake()
